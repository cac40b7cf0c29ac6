"""From records to batches. Reading order: config, sources, packing, pipeline, feed; synthetic stands beside."""
