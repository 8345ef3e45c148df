"""DuoAttention: training of gates that say which key/value heads retrieve, and which stream."""
