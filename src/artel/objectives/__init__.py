"""What is learned: record to samples, batch to loss, and the figures that judge the model."""
