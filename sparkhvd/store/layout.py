"""The names of files and folders inside a Store. Every folder that the library writes to is named in this module.

::

    datasets/<dataset id>/manifest.json         makes the dataset visible; written last
    datasets/<dataset id>/rows/...              its Parquet files, never changed once written
    leases/<dataset id>/...                     which driver uses a dataset, and until when it is kept
    fingerprints/<fingerprint>/<dataset id>     which dataset was prepared from which data
    names/<name>/<dataset id>                   which dataset has a name that the user chose
    alike/<digest>/<run id>                     runs of resume="auto" that differ only in their initial weights
    runs/<run id>/checkpoints/epoch-00003-by-00000002   the trainer's state after epoch 3 (epochs count from 0)
    runs/<run id>/checkpoints/epoch-00004-step-00000120-by-00000002     the same after 120 steps of epoch 4
    runs/<run id>/history.json                  one record per completed epoch
    runs/<run id>/logs/train/..., validation    the same records for TensorBoard
    runs/<run id>/holders/...                   which fit trains the run: numbered claims, see estimators.runs.run_lease
    runs/<run id>/checkpoints/ended             the final state of a run that a callback ended
    runs/<run id>/checkpoints/final-<epoch>     the final state after an epoch's checkpoint, if callbacks changed it
    runs/<run id>/saved/...                     files of the user's checkpoint callback, under their own names
    runs/<run id>/model/...                     the trained model's files
    runs/<run id>/result.json                   the result of a finished run, for a fit with resume="auto"
    elastic/<job id>/commit-<generation>-<number>       commits of run_elastic; removed when the job succeeds
    probes/<probe id>/...                       a check that all machines reach the Store; removed after the check

The meaning of a name never changes: new meanings get new names. Formats that can change carry a version inside
(``format_version`` of the manifest).
"""

from __future__ import annotations

import math
import re
import uuid
from datetime import UTC, datetime

from sparkhvd.errors import StoreError

DATASETS = "datasets"  # the folder of all prepared datasets

_AUTO = "auto-"
_DATASET_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{16}")
_CHECKPOINT = re.compile(r"epoch-(\d+)(?:-step-(\d+))?(?:-by-\d+)?")
_ENDED = re.compile(r"ended(?:-by-\d+)?")
_FINAL = re.compile(r"final-(\d{5})(?:-by-\d+)?")
_TOKEN = re.compile(r"(?:-by-|/claims/)(\d+)(?:-inherits)?$")


def new_dataset_id() -> str:
    """Return a unique id for a dataset."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:16]}"


def dataset_of_rows(path: str) -> str | None:
    """Return the dataset whose rows are in the file at ``path``; None for a file that no preparation wrote."""
    folder, _, rest = path.removeprefix(f"{DATASETS}/").partition("/")
    return folder if rest.startswith("rows/") and _DATASET_ID.fullmatch(folder) else None


def dataset_folder(dataset_id: str) -> str:
    """Return the folder of one prepared dataset."""
    return f"{DATASETS}/{_component('dataset id', dataset_id)}"


def dataset_rows_folder(dataset_id: str) -> str:
    """Return the folder of a dataset's Parquet files."""
    return f"{dataset_folder(dataset_id)}/rows"


def manifest_path(dataset_id: str) -> str:
    """Return the path of the manifest of one prepared dataset."""
    return f"{dataset_folder(dataset_id)}/manifest.json"


def dataset_at(url: str) -> tuple[str, str] | None:
    """Split the URL of a dataset's folder into the URL of the Store and the dataset's id; None for any other folder."""
    store, _, dataset_id = url.rstrip("/").rpartition("/datasets/")
    return (f"{store}/", dataset_id) if store and dataset_id and "/" not in dataset_id else None


LEASES = "leases"  # the folder of all leases


def lease_folder(dataset_id: str) -> str:
    """Return the folder of the leases that drivers hold on a dataset."""
    return f"{LEASES}/{_component('dataset id', dataset_id)}"


def lease_path(dataset_id: str, owner: str) -> str:
    """Return the path of the lease that one owner holds on a dataset."""
    return f"{lease_folder(dataset_id)}/{_component('lease', owner)}"


def leased_dataset(path: str) -> str:
    """Return the id of the dataset to which the lease at ``path`` belongs."""
    return path.split("/")[1]


def fingerprint_folder(fingerprint: str) -> str:
    """Return the folder that lists the datasets prepared from the same data in the same way."""
    return f"fingerprints/{_component('fingerprint', fingerprint)}"


def fingerprint_path(fingerprint: str, dataset_id: str) -> str:
    """Return the path of the note that a dataset has a fingerprint."""
    return f"{fingerprint_folder(fingerprint)}/{_component('dataset id', dataset_id)}"


def name_folder(name: str) -> str:
    """Return the folder that maps a user's name to its dataset."""
    return f"names/{_component('name', name)}"


def name_path(name: str, dataset_id: str) -> str:
    """Return the path of the note that a dataset has a name."""
    return f"{name_folder(name)}/{_component('dataset id', dataset_id)}"


def run_folder(run_id: str) -> str:
    """Return the folder of one training run."""
    return f"runs/{_component('run id', run_id)}"


def auto_run(content: str, weights: str) -> str:
    """Return the id of a run that is identified by its content: by digests without and with the initial weights."""
    return f"{_AUTO}{content[:24]}-{weights[:24]}"


def alike_folder(run_id: str) -> str:
    """Return the folder that lists the runs with the same first digest of ``auto_run``."""
    return f"alike/{run_id.removeprefix(_AUTO).partition('-')[0]}"


def alike_path(run_id: str) -> str:
    """Return the path of the note that such a run exists."""
    return f"{alike_folder(run_id)}/{_component('run id', run_id)}"


def run_of_note(path: str) -> str:
    """Return the run to which the note at ``path`` refers."""
    return path.rpartition("/")[2]


def checkpoints_folder(run_id: str) -> str:
    """Return the folder of a run's checkpoints."""
    return f"{run_folder(run_id)}/checkpoints"


def checkpoint_path(run_id: str, epoch: int, step: int | None = None, token: int = 0) -> str:
    """Return the path of a writer's checkpoint at the end of ``epoch`` (from 0), or after ``step`` steps of it."""
    if not 0 <= epoch < 100_000:
        raise StoreError(
            f"The epoch of run {run_id!r} must be within 0..99999, got {epoch}: checkpoint names have five digits."
        )
    within = "" if step is None else f"-step-{step:08d}"
    return f"{checkpoints_folder(run_id)}/epoch-{epoch:05d}{within}{_token_suffix(token)}"


def ended_path(run_id: str, token: int = 0) -> str:
    """Return the path of the checkpoint of a run that a callback ended, written after the callbacks' final changes."""
    return f"{checkpoints_folder(run_id)}/ended{_token_suffix(token)}"


def is_ended_path(path: str) -> bool:
    """Return whether ``ended_path`` made the path."""
    return _ENDED.fullmatch(path.rpartition("/")[2]) is not None


def final_path(run_id: str, epoch: int, token: int = 0) -> str:
    """Return the path of the state that callbacks left behind when training ended with this epoch."""
    return f"{checkpoints_folder(run_id)}/final-{epoch:05d}{_token_suffix(token)}"


def final_epoch(path: str) -> int | None:
    """Return the epoch in a path that ``final_path`` made; None for any other path."""
    match = _FINAL.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else None


def token_of(path: str) -> int:
    """Return the writer's token in the path of a checkpoint, claim or inheritance; 0 for any other path."""
    match = _TOKEN.search(path)
    return int(match[1]) if match else 0


def holders_folder(run_id: str) -> str:
    """Return the folder that records which fit trains a run."""
    return f"{run_folder(run_id)}/holders"


def claims_folder(run_id: str) -> str:
    """Return the folder of the tokens that writers of a run have claimed; the highest token owns the run."""
    return f"{holders_folder(run_id)}/claims"


def claim_path(run_id: str, token: int) -> str:
    """Return the path of the claim of one token."""
    return f"{claims_folder(run_id)}/{token:08d}"


def inheritance_path(run_id: str, token: int) -> str:
    """Return the path of the list of checkpoints that the owner of a token took over."""
    return f"{claim_path(run_id, token)}-inherits"


def is_inheritance(path: str) -> bool:
    """Return whether ``inheritance_path`` made the path."""
    return path.endswith("-inherits")


def beat_path(run_id: str, holder: str) -> str:
    """Return the path of the file that a running fit renews."""
    return f"{holders_folder(run_id)}/beats/{_component('holder', holder)}"


def checkpoint_position(path: str) -> tuple[int, float] | None:
    """Return the epoch and step of a path that ``checkpoint_path`` made; None for any other path.

    The step of an epoch's end is infinite, so that positions compare in the order of training.
    """
    match = _CHECKPOINT.fullmatch(path.rpartition("/")[2])
    return (int(match[1]), math.inf if match[2] is None else int(match[2])) if match else None


def history_path(run_id: str) -> str:
    """Return the path of a run's history, which is JSON."""
    return f"{run_folder(run_id)}/history.json"


def events_path(run_id: str, part: str, epoch: int) -> str:
    """Return the path of TensorBoard's file of one epoch; TensorBoard reads the files of a folder in name order."""
    return f"{run_folder(run_id)}/logs/{part}/events.out.tfevents.{epoch:010d}.sparkhvd"


def saved_path(run_id: str, name: str) -> str:
    """Return the path of a file that the user's checkpoint callback made."""
    return f"{run_folder(run_id)}/saved/{_component('file', name)}"


def model_folder(run_id: str) -> str:
    """Return the folder to which a run's trained model is exported."""
    return f"{run_folder(run_id)}/model"


def result_path(run_id: str) -> str:
    """Return the path of the result of a finished run."""
    return f"{run_folder(run_id)}/result.json"


def commits_folder(job_id: str) -> str:
    """Return the folder of the commits that one job of ``run_elastic`` publishes."""
    return f"elastic/{_component('job id', job_id)}"


def probe_folder(probe_id: str) -> str:
    """Return the folder of one check that a Store is shared; it is removed after the check."""
    return f"probes/{_component('probe id', probe_id)}"


def _token_suffix(token: int) -> str:
    return f"-by-{token:08d}" if token else ""


def _component(what: str, name: str) -> str:
    if not re.fullmatch(r"[^/\\\x00-\x1f]{1,200}", name) or name.startswith("."):
        raise StoreError(
            f"The {what} {name!r} cannot be a folder name; use 1 to 200 characters without '/', '\\' or control "
            "characters that do not start with a dot."
        )
    return name
