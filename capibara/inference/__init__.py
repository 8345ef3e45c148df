"""Generation with a trained model: how tokens are sampled, the engine, its server, answers in a terminal."""
