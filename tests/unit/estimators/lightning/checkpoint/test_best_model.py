from __future__ import annotations

from types import SimpleNamespace

import torch

from sparkhvd.estimators.lightning.checkpoint.best_model import best_file, unpack_best_model


def callback(path, monitor="val_loss"):
    return SimpleNamespace(monitor=monitor, best_model_path=str(path))


def test_the_best_model_is_the_one_whose_file_exists(tmp_path, caplog):
    there, gone = tmp_path / "best.ckpt", tmp_path / "of-an-earlier-process" / "best.ckpt"
    there.touch()
    assert best_file([callback(there, monitor=None)]) is None
    assert best_file([callback(""), SimpleNamespace()]) is None
    assert best_file([callback(gone), callback(there)]) == there
    assert not caplog.records
    assert best_file([callback(""), callback(gone)]) is None
    assert f"{gone}, no longer exists; the last model is returned" in caplog.text


def test_the_state_of_the_best_model_moves_to_the_folder_of_this_process(tmp_path):
    old, new = "/gone/checkpoints", tmp_path / "checkpoints"
    state = {
        "dirpath": old,
        "best_model_path": f"{old}/a/best.ckpt",
        "kth_best_model_path": f"{old}/second.ckpt",
        "last_model_path": "",
        "best_k_models": {f"{old}/a/best.ckpt": 0.1, f"{old}/second.ckpt": 0.2},
    }
    best = {"callback": "mine", "weights": {"w": torch.ones(2)}}
    mine, other = SimpleNamespace(state_key="mine", dirpath=str(new)), SimpleNamespace(state_key="other", dirpath="x")
    for given, callbacks in ((best, [other]), (None, [mine])):
        states = {"mine": dict(state)}
        unpack_best_model(given, callbacks, states, writes=True)
        assert states == {"mine": state}, "the best model or its callback is missing"
    assert not new.exists()
    unpack_best_model(best, [mine], states, writes=False)
    assert not new.exists()
    unpack_best_model(best, [mine], states, writes=True)
    assert states["mine"] == {
        "dirpath": str(new),
        "best_model_path": str(new / "a" / "best.ckpt"),
        "kth_best_model_path": str(new / "second.ckpt"),
        "last_model_path": "",
        "best_k_models": {str(new / "a" / "best.ckpt"): 0.1, str(new / "second.ckpt"): 0.2},
    }
    assert torch.load(new / "a" / "best.ckpt", weights_only=True)["state_dict"]["w"].tolist() == [1.0, 1.0]
