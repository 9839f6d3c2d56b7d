from diloco_cli.observe.run_record import read_run as read_run
from diloco_cli.region import Region as Region

__all__ = ["Region", "read_run"]
