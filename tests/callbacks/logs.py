"""What tests of logs share."""

import csv

from jaxdp import Callback


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


class Losses(Callback):
    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.seen[trainer.global_step] = metrics
