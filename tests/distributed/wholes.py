"""What the processes of a test do with batches of which a part has no rows."""

import equinox as eqx
import jax
import numpy as np
from together import Recorder, rows, tell, trainer

from jaxdp import Whole


class Timed(eqx.Module):
    """Classifies a row, weighed by times that all rows share."""

    last: eqx.nn.Linear

    def __call__(self, x):
        row, times = x
        return self.last(row * times.sum())


def batch(count, times):
    x, y = rows(count, seed=count)
    return (x, Whole(np.asarray(times, np.float32))), y


def train(local=False):
    """Of all rows, or of own ones; then with other values in each process.

    Of the last batch the second process has no rows.
    """
    index, count = jax.process_index(), jax.process_count()

    def own(each):
        (x, times), y = each
        return (x[index::count], times), y[index::count]

    # One that has no batch left goes on with the times that it had.
    last = [1.0, 2.0] if local else [0.5, 1.5, 0.5]
    data = [batch(16, [1.0, 2.0]), batch(1, last)]
    mine = [each for each in (map(own, data) if local else data) if len(each[1])]
    recorder, data_is = Recorder(), "local" if local else "global"
    model = Timed(eqx.nn.Linear(4, 3, key=jax.random.key(0)))
    run = trainer(callbacks=[recorder], model=model, data=data_is)
    run.fit(mine, max_epochs=2)
    predicted = run.predict(mine).sum(axis=0).tolist()
    losses, wrong = [*recorder.losses], ""
    if local:
        try:
            run.fit([batch(8, [index, 1.0])], max_epochs=3)
        except ValueError as error:
            wrong = str(error)
    tell(losses=losses, predicted=predicted, wrong=wrong)
