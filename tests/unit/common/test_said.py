"""Sentences of the server keep the template and the values they were made of, so that a page can translate them."""

import copy
import json
import pickle

from lora_atelier.trainer_core.common.wording import for_page, say


def test_a_sentence_is_its_english_text() -> None:
    said = say("step {0} of {1}", 3, 10)
    assert said == "step 3 of 10" and f"{said}." == "step 3 of 10." and json.dumps([said]) == '["step 3 of 10"]'


def test_an_exception_keeps_the_template() -> None:
    problem = ValueError(say("No process trains {0} now.", "cat"))
    assert str(problem) == "No process trains cat now." and for_page({"error": str(problem)}) == {
        "error": {"text": "No process trains cat now.", "key": "No process trains {0} now.", "values": ["cat"]}
    }


def test_sentences_stand_in_sentences_and_in_lists() -> None:
    phase = {"text": "sampling", "key": "sampling", "values": []}
    whole = {"text": "sampling 1 of 2", "key": "{0} {1} of {2}", "values": [phase, 1, 2]}
    assert for_page({"text": say("{0} {1} of {2}", say("sampling"), 1, 2), "more": (1.5, "plain", None)}) == {
        "text": whole,
        "more": [1.5, "plain", None],
    }


def test_values_may_hold_braces_and_copies_stay_whole() -> None:
    said = say("The run is called {0} now.", "{0}")
    assert said == "The run is called {0} now."
    for other in (copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        assert for_page(other) == for_page(said) and other.values == ("{0}",)
