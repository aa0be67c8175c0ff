"""Pickles as data: read into value trees and written again, never run. What torch puts in them is in `torchfile`."""
