"""Tests of work that several processes share."""
