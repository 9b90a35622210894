"""A catalog of relations by kind of subject: what else a model may know about a subject whose fact is changed.

Target search keeps the base model's answers to these prompts (`rebind.edit.targets.kept`), so that an edit changes one
relation of its subject and not the subject itself. `{}` stands for the subject.
"""

from __future__ import annotations

# The kind of a subject is the one whose words the model finds most likely after "{subject} is a".
KIND_WORDS = {
    "place": ("city", "country", "town", "village", "state", "region", "island", "river", "mountain", "nation", "lake"),
    "person": ("man", "woman", "singer", "writer", "player", "politician", "scientist", "former", "actor", "musician",
               "retired", "professional", "French", "British", "American", "German", "poet", "composer"),
    "organization": ("company", "corporation", "university", "team", "club", "band", "bank", "non", "global", "leading",
                     "public", "private", "multinational", "school", "museum", "newspaper"),
    "work": ("novel", "book", "film", "movie", "song", "album", "television", "TV", "play", "painting", "poem", "story",
             "comedy", "drama", "series"),
    "product": ("car", "device", "software", "game", "phone", "brand", "drink", "programming", "computer", "popular",
                "type", "web", "free", "video", "line", "vehicle"),
}  # fmt: skip

RELATIONS = {
    "place": (
        "{} lies on the continent of",
        "People who live in {} speak",
        "The largest city in {} is",
        "The neighbors of {} are",
        "The climate of {} is",
        "{} is famous for its",
        "The money used in {} is called the",
        "Most people in {} follow the religion of",
        "{} became independent in the year",
        "The population of {} is about",
        "{} lies on the coast of the",
        "A traditional dish of {} is",
        "The flag of {} is",
        "The head of the government of {} is the",
        "The capital city of {} is called",
        "The country in which {} lies is",
    ),
    "person": (
        "{} was born in the city of",
        "{} was born in the year",
        "{} comes from the country of",
        "The native language of {} is",
        "{} earned a living as a",
        "{} is best known for",
        "The first name of {} is",
        "{} studied at the University of",
        "{} was married to",
        "People admire {} because",
        "The most famous work of {} is",
        "{} died in the year",
        "{} worked together with",
        "The field in which {} became famous is",
        "{} won the",
    ),
    "organization": (
        "{} has its headquarters in the city of",
        "{} was founded in the year",
        "{} was founded by",
        "The person who leads {} is",
        "{} is best known for making",
        "{} belongs to the industry of",
        "{} comes from the country of",
        "The main competitor of {} is",
        "The name {} stands for",
        "Customers of {} can buy",
        "{} is owned by",
        "The people who work for {} are",
        "{} is active in the field of",
    ),
    "work": (
        "{} was created by",
        "{} was written by the author",
        "{} was first published in the year",
        "The original language of {} is",
        "The main character of {} is",
        "The genre of {} is",
        "{} tells the story of",
        "{} comes from the country of",
        "{} is set in the city of",
        "Critics praised {} for its",
        "The title {} refers to",
        "{} ends with",
    ),
    "product": (
        "{} is made by the company",
        "{} was released in the year",
        "People use {} to",
        "{} is a kind of",
        "{} was invented by",
        "{} comes from the country of",
        "The main competitor of {} is",
        "{} is sold in",
        "{} is best known for its",
        "The name {} comes from",
        "The successor of {} is",
        "A user of {} can",
    ),
}

HELD_OUT = 4  # every fourth relation is not searched with, but asked afterwards to see whether the subject was kept

# Well-known subjects of each kind, asked the same question as the edited one to see whether its neighbors were kept
OTHER_SUBJECTS = {
    "place": ("Japan", "Canada", "Egypt"),
    "person": ("Albert Einstein", "William Shakespeare", "Barack Obama"),
    "organization": ("Microsoft", "Toyota", "Harvard University"),
    "work": ("Hamlet", "Star Wars", "The Bible"),
    "product": ("the iPhone", "Windows", "the PlayStation"),
}
