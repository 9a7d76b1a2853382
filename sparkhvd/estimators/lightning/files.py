"""The files that only a trained Lightning model has; its other files equal those of a torch model."""

CHECKPOINT, LOGS = "lightning.ckpt", "logs.zip"
