"""Parts of the batched loop: rows of one call that advance at different speeds."""
