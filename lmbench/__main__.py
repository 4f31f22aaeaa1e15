import sys

from lmbench.cli import main

sys.exit(main())
