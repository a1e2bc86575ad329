"""The rewrites from a flat recommender to a tower-partitioned program, one pass per file. Import as ``dmt_compile.passes``."""
