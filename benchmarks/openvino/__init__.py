"""This server beside OpenVINO GenAI, which prunes by CDPruner, on one CPU with the same weights."""
