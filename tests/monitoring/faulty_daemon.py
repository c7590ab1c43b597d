"""The daemon's command line, with faults: a batch that holds a certain text has the loss NaN, or is never done.

python -m tests.monitoring.faulty_daemon run --config FILE
"""

import time
from typing import Any

from streamlearn.cli.main import main
from streamlearn.daemon.build import Components
from streamlearn.learner import learner
from streamlearn.learner.loss import PackedLoss, packed_loss

SPOIL = "spoil this update"
HANG = "never end this update"
HANG_S = 3600.0


def inject() -> None:
    real_init = Components.__init__

    def init(self: Components, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self.learner.forward.spell = self.model.backbone.tokenizer.decode

    def spoiled(model: Any, row: Any) -> PackedLoss:
        loss = packed_loss(model, row)
        text = model.spell(row.input_ids[0].tolist())
        if HANG in text:
            time.sleep(HANG_S)
        return PackedLoss(loss.mean * float("nan"), loss.token_L, loss.correct_L) if SPOIL in text else loss

    Components.__init__ = init  # type: ignore[method-assign]
    setattr(learner, "packed_loss", spoiled)  # noqa: B010 - the module imports it, and does not export it


if __name__ == "__main__":
    inject()
    main()
