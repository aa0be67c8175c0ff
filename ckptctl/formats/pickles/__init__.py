"""Pickles as data: read into value trees and written again, never run. No framework's knowledge is here; `torchfile` has torch's."""
