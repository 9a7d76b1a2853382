from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkhvd import deadline
from sparkhvd.store.access import renaming


def test_exactly_one_of_many_writers_of_a_name_wins(tmp_path):
    target, start = tmp_path / "manifest", threading.Barrier(8)
    won, lost = [], []

    def write(number):
        temporary = tmp_path / f"{number}.unfinished"
        temporary.write_text(str(number))
        start.wait(10)
        try:
            renaming.rename_once(temporary, target)
        except FileExistsError:
            lost.append(number)
        else:
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(won), len(lost)) == (1, 7)
    assert target.read_text() == str(won[0])
    assert not list(tmp_path.glob(".*.claim"))


def test_a_writer_that_finds_a_claim_waits_for_its_outcome(tmp_path, monkeypatch):
    claim, target, temporary = tmp_path / ".m.claim", tmp_path / "m", tmp_path / "t"
    temporary.write_text("second")
    claim.mkdir()

    def not_yet_created(_):
        target.write_text("first")
        return False

    monkeypatch.setattr(renaming, "_create", not_yet_created)
    with pytest.raises(FileExistsError, match=str(target)):
        renaming.rename_once(temporary, target)
    assert target.read_text() == "first"
    assert claim.exists(), "it belongs to the first"


def leave_claim(target, *tokens):
    """Leave the claim of a killed writer."""
    claim = target.with_name(f".{target.name}.claim")
    claim.mkdir()
    for token in tokens:
        (claim / token).mkdir()
    return claim


@pytest.fixture
def pass_time(monkeypatch):
    """Return a function that lets seconds pass instead of waiting."""
    now = [1000.0]
    clock = SimpleNamespace(sleep=lambda _seconds: None, monotonic=lambda: now[0])  # not for all threads
    monkeypatch.setattr(renaming, "time", clock)
    monkeypatch.setattr(deadline, "time", clock)

    def let_pass(seconds):
        now[0] += seconds

    clock.sleep = lambda _seconds: let_pass(31)
    return let_pass


@pytest.mark.parametrize("tokens", [(), ("killed",)])
def test_the_claim_of_a_killed_writer_is_removed(tmp_path, pass_time, tokens):
    target, temporary = tmp_path / "m", tmp_path / "t"
    temporary.write_text("second")
    claim = leave_claim(target, *tokens)
    renaming.rename_once(temporary, target)
    assert target.read_text() == "second"
    assert not claim.exists()


def test_a_claim_is_kept_however_old_it_is_by_the_clock_of_another_machine(tmp_path, monkeypatch, pass_time):
    target, temporary = tmp_path / "m", tmp_path / "t"
    temporary.write_text("second")
    claim = leave_claim(target, "of a live writer")
    os.utime(claim, (0, 0))

    def rename_first(_seconds):
        assert (claim / "of a live writer").exists()
        target.write_text("first")
        renaming._remove(claim, claim / "of a live writer")

    monkeypatch.setattr(renaming.time, "sleep", rename_first)
    with pytest.raises(FileExistsError, match=str(target)):
        renaming.rename_once(temporary, target)
    assert target.read_text() == "first"


@pytest.mark.parametrize("tokens", [(), ("killed",)])
def test_a_writer_that_removes_an_old_claim_late_does_not_remove_its_successor(
    tmp_path, monkeypatch, pass_time, tokens
):
    target, temporary = tmp_path / "m", tmp_path / "t"
    temporary.write_text("late")
    claim = leave_claim(target, *tokens)
    rmdir = Path.rmdir
    others = claim / "of another writer"

    def remove_after_another_writer(folder):
        if claim not in {folder, folder.parent}:  # by another thread
            return rmdir(folder)
        monkeypatch.setattr(Path, "rmdir", rmdir)
        renaming._remove(claim, *renaming._tokens(claim))
        assert renaming._acquire(claim, others)
        return rmdir(folder)

    def publish_first(_seconds):
        pass_time(31)
        if others.exists():
            target.write_text("first")
            renaming._remove(claim, others)

    monkeypatch.setattr(Path, "rmdir", remove_after_another_writer)
    monkeypatch.setattr(renaming.time, "sleep", publish_first)
    with pytest.raises(FileExistsError, match=str(target)):
        renaming.rename_once(temporary, target)
    assert target.read_text() == "first"
    assert not claim.exists()
