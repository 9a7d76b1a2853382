from __future__ import annotations

from types import SimpleNamespace

from sparkhvd.estimators.lightning.best_model import best_file


def callback(path, monitor="val_loss"):
    return SimpleNamespace(monitor=monitor, best_model_path=str(path))


def test_the_best_model_is_the_one_that_is_there(tmp_path, caplog):
    there, gone = tmp_path / "best.ckpt", tmp_path / "of-an-earlier-process" / "best.ckpt"
    there.touch()
    assert best_file([callback(there, monitor=None)]) is None
    assert best_file([callback(""), SimpleNamespace()]) is None
    assert best_file([callback(gone), callback(there)]) == there
    assert not caplog.records
    assert best_file([callback(""), callback(gone)]) is None
    assert f"{gone}, is gone; the last one is returned" in caplog.text
