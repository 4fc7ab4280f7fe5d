"""Stand-in for seqio 0.0.20 (Apache-2.0, https://github.com/google/seqio); README.md beside it says why."""
