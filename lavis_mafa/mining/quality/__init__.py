"""Label judged pairs by hand, and measure Con-D by labels or ground truth."""
