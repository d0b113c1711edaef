"""`MscclFile`: an algorithm in MSCCL's XML, read strictly, as it stands in the file.

    <algo name proto nchannels nchunksperloop ngpus coll inplace [outofplace minBytes maxBytes ...]>
      <gpu id i_chunks o_chunks s_chunks>
        <tb id send recv chan>
          <step s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep/>

Every GPU is there once. What the run-times refuse, each in its own way, is said in `optcc.verify.gpu.msccl_limits`;
what the steps do, in `optcc.verify.gpu.msccl_interpreter`.
"""

from __future__ import annotations

from dataclasses import dataclass

from optcc.errors import CodecError
from optcc.strict_xml import XmlElement, parse_xml

PROTOCOLS = ("Simple", "LL", "LL128")
COLLECTIVES = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reduce_scatter": "reducescatter",
    "reducescatter": "reducescatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "custom": "custom",
}
"""The spellings of `coll`; the last one promises nothing that could be judged."""
KINDS = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
RECEIVES = frozenset(("r", "rcs", "rrs", "rrc", "rrcs"))
SENDS = frozenset(("s", "rcs", "rrs", "rrcs"))
READS = frozenset(("s", "rrs", "rrc", "rrcs", "cpy", "re"))
"""Those that read the place at `src`; `re` reads the one at `dst` as well."""
WRITES = frozenset(("r", "rcs", "rrc", "rrcs", "cpy", "re"))
GPUS_MAX = 1024
CHUNKS_MAX = 2**15
CELLS_MAX = 2**20
BLOCKS_MAX = 4096
CLOCKS_MAX = 2**28
"""Steps by thread blocks: what the clocks of the verifier would need in the worst case."""
_STEP = ("s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep")

ChunkPlace = tuple[str, int]
"""A buffer (`i`, `o`, `s`) and the number of a chunk in it."""


@dataclass(frozen=True, slots=True)
class MscclStep:
    """A step as written, with its line; `waits` is a thread block and a step of it, or None."""

    line: int
    number: int
    kind: str
    src: ChunkPlace
    dst: ChunkPlace
    count: int
    waits: tuple[int, int] | None
    has_dependents: bool

    def __str__(self) -> str:
        return f"step {self.number} {self.kind}"


@dataclass(frozen=True, slots=True)
class MscclBlock:
    """A thread block: its peers (-1 for none), its channel and its steps."""

    line: int
    gpu: int
    number: int
    send: int
    recv: int
    channel: int
    steps: tuple[MscclStep, ...]


@dataclass(frozen=True, slots=True)
class MscclGpu:
    """A GPU: how many chunks it declares of each buffer, and its thread blocks in the order of the file."""

    line: int
    number: int
    chunks: dict[str, int]
    blocks: tuple[MscclBlock, ...]


@dataclass(frozen=True, slots=True)
class MscclFile:
    """An algorithm; `places` says how it may be called: in place (True), out of place (False), or both.

    `gpus` are in the order of their numbers. `attributes` are those of `algo` as written.
    """

    name: str
    protocol: str
    n_channels: int
    n_chunks: int
    n_gpus: int
    collective: str
    places: tuple[bool, ...]
    gpus: tuple[MscclGpu, ...]
    attributes: dict[str, str]
    line: int

    @classmethod
    def parse(cls, data: bytes) -> MscclFile:
        """Reads a file; raises CodecError, with the line, for what is not such an algorithm."""
        root = parse_xml(data)
        if root.name != "algo":
            raise root.fail("must be <algo>")
        required = ("name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll", "inplace")
        optional = ("outofplace", "minBytes", "maxBytes", "nthreads", "nthreadblocks", "maxcount", "redop", "redOp")
        root.check(required, optional, ("gpu",))
        n_gpus = root.integer("ngpus", 1, GPUS_MAX)
        in_place = root.integer("inplace", 0, 1)
        out_of_place = root.integer("outofplace", 0, 1, default=1 - in_place)
        for name in ("minBytes", "maxBytes"):
            root.integer(name, 0, 2**63 - 1, default=0)
        places = (*((True,) if in_place else ()), *((False,) if out_of_place else ()))
        if not places:
            raise root.fail("inplace, outofplace: one of them must be 1")
        gpus = [_read_gpu(each, n_gpus) for each in root.children]
        file = cls(
            root.attributes["name"],
            root.one_of("proto", PROTOCOLS),
            root.integer("nchannels", 1, 2**15),
            root.integer("nchunksperloop", 1, CHUNKS_MAX),
            n_gpus,
            COLLECTIVES[root.one_of("coll", tuple(COLLECTIVES))],
            places,
            tuple(sorted(gpus, key=lambda gpu: gpu.number)),
            dict(root.attributes),
            root.line,
        )
        file._check(root)
        return file

    def _check(self, root: XmlElement) -> None:
        """Raises CodecError if a GPU is missing or twice, or the chunks cannot be shared out."""
        seen: dict[int, int] = {}
        for gpu in self.gpus:
            if gpu.number in seen:
                raise CodecError(f"line {gpu.line}: <gpu>: id {gpu.number}: is on line {seen[gpu.number]} already")
            seen[gpu.number] = gpu.line
        for number in range(self.n_gpus):
            if number not in seen:
                raise root.fail(f"ngpus {self.n_gpus}: GPU {number} is missing")
        shared = self.collective in ("allgather", "reducescatter", "alltoall")
        if shared and self.n_chunks % self.n_gpus:
            raise root.fail(f"nchunksperloop {self.n_chunks}: must be a multiple of ngpus {self.n_gpus}")
        cells = sum(3 * self.n_chunks + sum(gpu.chunks.values()) for gpu in self.gpus)
        blocks = sum(len(gpu.blocks) for gpu in self.gpus)
        steps = sum(len(block.steps) for gpu in self.gpus for block in gpu.blocks)
        for what, amount, most in (
            ("chunks", cells, CELLS_MAX),
            ("thread blocks", blocks, BLOCKS_MAX),
            ("steps by thread blocks", steps * blocks, CLOCKS_MAX),
        ):
            if amount > most:
                raise root.fail(f"{amount} {what} in all: must be at most {most}")

    def capacity(self, gpu: MscclGpu) -> dict[str, int]:
        """How many chunks each buffer of a GPU has, whatever it declares: the caller's buffers follow from `coll`."""
        share = self.n_chunks // self.n_gpus
        data = {"i": self.n_chunks, "o": self.n_chunks}
        if self.collective == "custom":
            data = {"i": gpu.chunks["i"], "o": gpu.chunks["o"]}
        elif self.collective == "allgather":
            data["i"] = share
        elif self.collective == "reducescatter":
            data["o"] = share
        return data | {"s": gpu.chunks["s"]}


def _read_gpu(element: XmlElement, n_gpus: int) -> MscclGpu:
    element.check(("id", "i_chunks", "o_chunks", "s_chunks"), (), ("tb",))
    number = element.integer("id", 0, n_gpus - 1)
    chunks = {buffer: element.integer(f"{buffer}_chunks", 0, CHUNKS_MAX) for buffer in "ios"}
    blocks = tuple(_read_block(each, number, n_gpus) for each in element.children)
    seen: dict[int, int] = {}
    for block in blocks:
        if block.number in seen:
            raise CodecError(f"line {block.line}: <tb>: id {block.number}: is on line {seen[block.number]} already")
        seen[block.number] = block.line
    for at in range(len(blocks)):
        if at not in seen:
            raise element.fail(f"thread block {at} is missing: their ids must count from 0")
    return MscclGpu(element.line, number, chunks, blocks)


def _read_block(element: XmlElement, gpu: int, n_gpus: int) -> MscclBlock:
    element.check(("id", "send", "recv", "chan"), (), ("step",))
    send, recv = (element.integer(side, -1, n_gpus - 1) for side in ("send", "recv"))
    if gpu in (send, recv):
        raise element.fail(f"send {send}, recv {recv}: must not be the GPU itself")
    number, channel = element.integer("id", 0, 2**15), element.integer("chan", 0, 2**15)
    steps = tuple(_read_step(each, send, recv) for each in element.children)
    return MscclBlock(element.line, gpu, number, send, recv, channel, steps)


def _read_step(element: XmlElement, send: int, recv: int) -> MscclStep:
    element.check(_STEP)
    kind = element.one_of("type", KINDS)
    if kind in SENDS and send < 0:
        raise element.fail(f"type {kind}: sends, and the thread block's send is -1")
    if kind in RECEIVES and recv < 0:
        raise element.fail(f"type {kind}: receives, and the thread block's recv is -1")
    src, dst = (
        (element.one_of(f"{side}buf", ("i", "o", "s")), element.integer(f"{side}off", -1, CHUNKS_MAX))
        for side in ("src", "dst")
    )
    count = element.integer("cnt", 0 if kind == "nop" else 1, CHUNKS_MAX)
    block = element.integer("depid", -1, 2**15)
    step = element.integer("deps", -1 if block < 0 else 0, 2**15)
    return MscclStep(
        element.line,
        element.integer("s", 0, 2**15),
        kind,
        src,
        dst,
        count,
        None if block < 0 else (block, step),
        bool(element.integer("hasdep", 0, 1)),
    )
