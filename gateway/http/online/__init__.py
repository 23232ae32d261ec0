"""Training in the background while the same model serves: examples go in, versions come out.

POST /train ──► examples (kept on disk) ──► Learner: batch, step, publish ──► versions, sampled from by name
"""
