"""What the app says of errors: whole sentences, whatever the one who found the fault ends his with."""

import pytest

from app.core.words import full_message, sentence_of
from trainer.errors import JobError, sentence_and_remedy


@pytest.mark.parametrize("sentence", ["The base is gone.", "a.toml: schema: is missing: the version of its form"])
def test_what_happened_and_what_to_do_are_two_sentences(sentence):
    told = full_message(JobError("a", sentence, "Ask for another."))
    assert told == sentence.rstrip(".") + ". Ask for another."


def test_a_reason_becomes_a_sentence_of_its_own():
    assert sentence_of("must be above 0, not -1") == "Must be above 0, not -1."
    assert sentence_of("Is it there?") == "Is it there?"


def test_either_of_what_happened_and_what_to_do_may_be_missing():
    assert sentence_and_remedy("The base is gone", "") == "The base is gone."
    assert sentence_and_remedy("", "Choose a base.") == "Choose a base."
    assert sentence_and_remedy("The base is gone", "Choose another.") == "The base is gone. Choose another."
