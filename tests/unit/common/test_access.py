"""What may be read for a workflow: by name, by the place that a link leads to, and nothing is touched to find out."""

import os

import pytest

from lora_atelier.trainer_core.common.access import ANYWHERE, access_to


@pytest.fixture
def places(tmp_path):
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for folder in (own, foreign):
        (folder / "deep").mkdir(parents=True)
        (folder / "a.txt").write_text("words")
    return own, foreign


def test_a_folder_and_all_in_it_may_be_read_and_nothing_beside_it(places):
    own, foreign = places
    access = access_to([own])
    inside = (own, own / "a.txt", own / "deep" / "missing.png", own / "deep" / ".." / "a.txt")
    outside = (own.parent, foreign / "a.txt", own / ".." / "foreign" / "a.txt", f"{own}-more/a.txt", "a.txt")
    assert [access.allows(path) for path in (*inside, *outside)] == [True] * 4 + [False] * 5
    assert not access_to([]).allows(own / "a.txt") and ANYWHERE.allows(foreign)


def test_a_link_counts_as_the_place_that_it_leads_to(places):
    own, foreign = places
    (own / "out.txt").symlink_to(foreign / "a.txt")
    (own / "folder").symlink_to(foreign, target_is_directory=True)
    (own / "inside.txt").symlink_to(own / "a.txt")
    (own / "round").symlink_to(own / "round")
    access = access_to([own])
    assert not access.allows(own / "out.txt") and not access.allows(own / "folder" / "a.txt")
    assert access.allows(own / "inside.txt") and access.allows(own / "round")


def test_a_folder_behind_a_link_has_both_names(places):
    own, foreign = places
    (own / "link").symlink_to(foreign, target_is_directory=True)
    access = access_to([own / "link"])
    assert access.allows(own / "link" / "a.txt") and access.allows(foreign / "a.txt") and not access.allows(own)


def test_what_lies_elsewhere_is_not_touched(places, monkeypatch):
    own, foreign = places
    access = access_to([own])
    touched = []
    monkeypatch.setattr(os.path, "realpath", lambda path: touched.append(path) or str(path))
    assert not access.allows(foreign / "a.txt") and not touched
    assert access.allows(own / "a.txt") and touched
