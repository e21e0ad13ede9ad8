"""
Kernels, one package each. Their sources live in the repository's `kernels/` folder, where each is a complete project
for the Hub; the build maps their Python packages in here, so there is one copy of the source.
"""
