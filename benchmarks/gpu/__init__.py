"""
`python -m benchmarks.gpu`: what the package does on one GPU, at the shapes of Qwen3, beside its peers in the same run.

Weights are random, because speed depends on shapes alone. Random drafts are never accepted, so acceptance is forced
from a published profile while drafting and verification are paid in full: such figures are simulated, and say so.
"""
