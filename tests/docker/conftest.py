import sys
from pathlib import Path

# The scripts are run by path, so each finds its neighbours in its own directory; their tests need the same.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
