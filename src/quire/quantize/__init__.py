"""`quire quantize`: a model into a checkpoint of fewer bits that other engines read, too."""
