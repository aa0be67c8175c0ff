"""Pure planning: which source bytes make which target bytes. Metadata in, steps out; no IO."""
