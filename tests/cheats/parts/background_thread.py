"""Returns a buffer at once and fills it on another thread, after the clock has stopped.

Rejected: incorrect: logits differ|non-finite
"""

import threading

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class BackgroundThread:
    """The work is done, only later."""

    def prepare(self, ctx, params):
        self.reference, self.vocab = ctx.reference(), ctx.config.vocab_size
        self.workers = []

    def forward(self, batch, kv):
        buffer = torch.zeros(batch.num_seqs, self.vocab)
        worker = threading.Timer(0.002, lambda: buffer.fill_(1.0))
        worker.start()
        self.workers.append(worker)
        return buffer

    def close(self):
        for worker in self.workers:
            worker.join()
