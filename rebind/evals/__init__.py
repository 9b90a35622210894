"""What an edit did: records to ask about, metrics, protocols and reports."""
