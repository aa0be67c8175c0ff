"""ckptctl: inspect, convert and compare training checkpoints without the framework that wrote them."""

__version__ = "0.1.0"
