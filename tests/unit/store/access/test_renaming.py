from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

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
    """Leave the claim of a writer that was killed two minutes ago."""
    claim = target.with_name(f".{target.name}.claim")
    claim.mkdir()
    for token in tokens:
        (claim / token).mkdir()
    os.utime(claim, (time.time() - 120, time.time() - 120))
    return claim


@pytest.mark.parametrize("tokens", [(), ("killed",)])
def test_the_claim_of_a_killed_writer_is_removed(tmp_path, monkeypatch, tokens):
    target, temporary = tmp_path / "m", tmp_path / "t"
    temporary.write_text("second")
    claim = leave_claim(target, *tokens)
    monkeypatch.setattr(renaming, "_POLL_SECONDS", 0.0)
    renaming.rename_once(temporary, target)
    assert target.read_text() == "second"
    assert not claim.exists()


@pytest.mark.parametrize("tokens", [(), ("killed",)])
def test_a_writer_that_removes_an_old_claim_late_does_not_remove_its_successor(tmp_path, monkeypatch, tokens):
    target, temporary = tmp_path / "m", tmp_path / "t"
    temporary.write_text("late")
    claim = leave_claim(target, *tokens)
    rmdir = Path.rmdir
    others = claim / "of another writer"

    def remove_after_another_writer(folder):
        if claim not in {folder, folder.parent}:  # by another thread
            return rmdir(folder)
        monkeypatch.setattr(Path, "rmdir", rmdir)
        renaming._remove_expired(claim)
        assert renaming._acquire(claim, others)
        return rmdir(folder)

    def publish_first(_seconds):
        assert others.exists()
        target.write_text("first")
        renaming._remove(claim, others)

    monkeypatch.setattr(Path, "rmdir", remove_after_another_writer)
    monkeypatch.setattr(renaming, "time", SimpleNamespace(sleep=publish_first, time=time.time))  # not for all threads
    with pytest.raises(FileExistsError, match=str(target)):
        renaming.rename_once(temporary, target)
    assert target.read_text() == "first"
    assert not claim.exists()
