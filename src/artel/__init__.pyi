from artel import config as config
from artel.api import Answer as Answer
from artel.api import Entity as Entity
from artel.api import Filled as Filled
from artel.api import Model as Model
from artel.api import Ranked as Ranked
from artel.api import Run as Run
from artel.api import RunPlan as RunPlan
from artel.api import open as open
from artel.api import plan as plan
from artel.api import prepare as prepare
from artel.api import push as push
from artel.api import train as train
from artel.config import RunConfig as RunConfig
from artel.errors import ArtelError as ArtelError
from artel.errors import InputError as InputError
from artel.errors import Interrupted as Interrupted
from artel.errors import WorkError as WorkError

__version__: str
