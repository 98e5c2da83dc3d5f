"""Fault injection: reads whose bytes are changed, or noticed, after they landed and before they are verified."""


def damaged(kind, tamper):
    """ArrivingRead `kind`, but `tamper(memory, offset, num_bytes)` is called for every piece that has landed."""

    class DamagedRead(kind):
        def receipt(self):
            return None  # so that it is called instead

        def __call__(self, num_bytes):
            for offset in (
                self.pieces[self.num_landed // self.chunk_bytes : num_bytes // self.chunk_bytes].ravel().tolist()
            ):
                tamper(self.memory, offset, self.piece_bytes)
            super().__call__(num_bytes)

    return DamagedRead
