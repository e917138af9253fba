from __future__ import annotations

import os
import time
from pathlib import Path

import structlog
from msgspec import structs

from hearth.actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from hearth.actors.arena import Arena
from hearth.actors.encoder import EncoderActor, Tower
from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import EncoderControl, EncoderMessage
from hearth.actors.picture_decoder import PictureDecoder
from hearth.actors.roles import EncoderSettings, Host, ReadyActor
from hearth.actors.tower_memory import TowerMemory
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.engine_folder import check_identity, verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.tower_answer import check_tower_answer
from hearth.runtime.undo import undoing
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig, load_vision_config

_FLUSH_S = 2.0
_log = structlog.get_logger("encoder")


def open_encoder(host: Host, settings: EncoderSettings) -> ReadyActor:
    """Start the decoder's process, open the tower where it runs here; raises HearthError."""
    started = time.monotonic()
    # Also that of the decoder's process.
    os.nice(settings.own.nice)
    check_identity(Path(settings.engine), settings.identity)
    config = load_vision_config(Path(settings.engine))
    if config is None:
        raise HearthError("engine_missing", f"{settings.engine} has no vision tower", "engine")
    with undoing() as undo:
        decoder = PictureDecoder(
            config,
            settings.pictures,
            settings.patches,
            timeout_s=settings.own.image_decode_timeout_s,
            memory=settings.own.image_decode_memory_bytes,
        )
        undo.callback(decoder.close)
        tower = None
        asked = settings.options.device
        if (config.device if asked == "auto" else asked) == "cpu":
            tower = _open_tower(settings, config)
            undo.callback(tower.runner.close)
        decoder.wait_ready()
    addresses, context = host.addresses, host.context
    actor = EncoderActor(
        name=host.name,
        inbox=Receiver(context, [addresses.work], EncoderMessage, WORK_LIMIT),
        control=Receiver(context, [addresses.control], EncoderControl, CONTROL_LIMIT),
        to_scheduler=Sender(context, addresses.scheduler, WORK_LIMIT, _FLUSH_S),
        to_supervisor=host.to_supervisor,
        decoder=decoder,
        tower=tower,
    )
    return ReadyActor(actor.run, {"load_s": round(time.monotonic() - started, 3)})


def _open_tower(settings: EncoderSettings, config: VisionConfig) -> Tower:
    """The tower of the engine folder, which has given its known answer."""
    options, folder = settings.options, Path(settings.engine) / VISION_FOLDER
    verify_folder(folder, config, digests=options.verify)
    threads = EngineOptions(threads=settings.own.threads, spin=options.spin)
    with undoing() as undo:
        runner = VisionRunner.open(folder, config, threads, CpuDevice())
        undo.callback(runner.close)
        if options.verify:
            report = check_tower_answer(runner, folder)
            _log.info("the vision tower's known answer is right", **structs.asdict(report))
        else:
            _log.warning("the vision tower's known answer is not compared", reason="verify is off")
        arenas = (
            Arena.open(one.descriptor, one.size) for one in (settings.patches, settings.embeddings)
        )
        return Tower(runner, TowerMemory(config, *arenas))
