"""Reports on converted models: what ran in which format and why, the scaling state, comparisons, the data flow."""
