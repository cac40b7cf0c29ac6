"""From records to batches. Reading order: config, sources, packing, streams, worker, pipeline, feed; and synthetic."""
