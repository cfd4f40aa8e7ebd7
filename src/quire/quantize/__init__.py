"""`quire quantize`: writes a quantized checkpoint that other engines can read as well."""
