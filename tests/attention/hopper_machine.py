"""A machine of clusters for programs in Pallas Mosaic GPU, in plain Python: who waits for whom.

JAX's interpreter has no clusters. Here each warpgroup of a cluster is a thread, of which one runs
at a time. At each wait, arrival and copy a seeded draw says what goes on: a warpgroup, or a copy or
an arrival that is under way. Copies read and write when they are drawn, and products read their
operands when they are awaited: what is overwritten too early is wrong in the result. Faults are
- that nothing can go on,
- a barrier two phases ahead of a warpgroup that waits for it: its bit of parity cannot tell,
- a copy or an arrival for a program that has ended,
- a copy of what was written before it with no fence between, and
- a barrier that is left half full.
"""

import functools
import itertools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

# Whether a thread has written since its last fence.
writes = threading.local()


class Fault(AssertionError):
    """What a GPU would not survive, or would not tell."""


class Ref:
    """A part of an array, of which each program of a cluster has one, or all the same."""

    def __init__(self, of_programs, program, path=()):
        self.of_programs, self.program, self.path = of_programs, program, path

    def view(self, program=None):
        found = self.of_programs[self.program if program is None else program]
        for index in self.path:
            found = found.T if index is None else found[index]
        return found

    def transpose(self, _):
        return Ref(self.of_programs, self.program, (*self.path, None))

    at = property(lambda self: At(self))
    shape = property(lambda self: self.view().shape)

    def __getitem__(self, index):
        return jnp.asarray(np.array(self.at[index].view()))

    def __setitem__(self, index, value):
        writes.unfenced = True
        self.at[index].view()[...] = np.asarray(value)


class At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        def plain(i):
            if hasattr(i, "size") and hasattr(i, "start"):
                return slice(int(i.start), int(i.start) + i.size)
            return i if i is Ellipsis or isinstance(i, slice) else int(i)

        index = tuple(map(plain, index if isinstance(index, tuple) else (index,)))
        return Ref(self.ref.of_programs, self.ref.program, (*self.ref.path, index))


class Barrier:
    """Its phase ends when all arrivals have come, and all bytes that they await."""

    def __init__(self, arrivals):
        self.needed = self.left = arrivals
        self.bytes = self.phase = 0

    def change(self, arrivals, size):
        self.left -= arrivals
        self.bytes += size
        if not self.left and not self.bytes:
            self.left, self.phase = self.needed, self.phase + 1


def one(ref, program=None) -> Barrier:
    """The barrier of a part of an array of barriers, or the only one of an array."""
    return np.asarray(ref.view(program)).item()


class Accumulator:
    def __init__(self, machine, value):
        self.machine, self.value = machine, np.array(value)

    def __getitem__(self, index):
        self.machine.wgmma_wait(0)
        return jnp.asarray(self.value[index])


class Machine:
    def __init__(self, seed):
        self.random, self.lock = np.random.default_rng(seed), threading.Condition()
        self.own, self.loaded = threading.local(), 0

    def run(self, body, coordinates, programs, groups, scratch, arrays):
        """A cluster of programs of so many warpgroups, with their arrays in global memory."""
        self.under_way, self.fault, self.turn, self.barriers = [], None, None, []
        self.groups, self.programs = groups, range(programs)
        everyone = list(itertools.product(range(programs), range(groups)))
        self.alive, self.waiting = set(everyone), dict.fromkeys(everyone, lambda: True)
        memory = [self.allocate(*kind) for kind in scratch]

        def warpgroup(p, g):
            self.own.key, self.own.seen = (p, g), {}
            self.own.products, self.own.stores = [], []
            self.own.coordinates = coordinates | {"cluster": p, "group": g}
            try:
                self.wait_for_turn()
                refs = jax.tree.map(lambda x: Ref([x] * programs, p), arrays)
                body(*refs, *(Ref(each, p) for each in memory))
            except BaseException as fault:  # noqa: BLE001
                self.fault = self.fault or fault
            with self.lock:
                self.alive.discard((p, g))
                self.pick()

        threads = [threading.Thread(target=warpgroup, args=key) for key in everyone]
        for each in threads:
            each.start()
        with self.lock:
            self.pick()
        for each in threads:
            each.join()
        if self.fault:
            raise self.fault
        if any(b.left != b.needed or b.bytes for b in self.barriers):
            raise Fault("a barrier is half full")

    def allocate(self, kind, *how):
        if kind == "array":
            return [np.full(how[0], np.nan, how[1]) for _ in self.programs]
        arrivals, count = how
        arrivals *= len(self.programs) if kind == "cluster" else 1
        made = [[Barrier(arrivals) for _ in range(count)] for _ in self.programs]
        self.barriers += itertools.chain(*made)
        return [np.array(each, object) for each in made]

    def pick(self):
        """Draws what goes on: copies and arrivals until it is a warpgroup."""
        while not self.fault:
            ready = [key for key, can in self.waiting.items() if can()]
            speeds = np.array([1.0] * len(ready) + [speed for speed, *_ in self.under_way])
            if not len(speeds):
                if self.waiting:
                    self.fault = Fault(f"nothing can go on: {sorted(self.waiting)} wait")
                break
            drawn = self.random.choice(len(speeds), p=speeds / speeds.sum())
            if drawn < len(ready):
                self.turn = ready[drawn]
                break
            _, program, act = self.under_way.pop(drawn - len(ready))
            if not any(p == program for p, _ in self.alive):
                self.fault = Fault(f"program {program} has ended")
            act()
        self.lock.notify_all()

    def send(self, program, act):
        """Something that comes to a program: soon, or late."""
        self.under_way.append((10 ** -self.random.uniform(0, 4), program, act))

    def wait_for_turn(self):
        with self.lock:
            while self.turn != self.own.key and not self.fault:
                self.lock.wait()
            if self.fault:
                raise self.fault
            self.turn = None
            del self.waiting[self.own.key]

    def give_way(self, can=lambda: True):
        with self.lock:
            self.waiting[self.own.key] = can
            self.pick()
        self.wait_for_turn()

    # What programs call.

    def barrier_wait(self, ref):
        barrier = one(ref)
        seen = self.own.seen.get(id(barrier), 0)
        self.give_way(lambda: barrier.phase > seen)
        if barrier.phase > seen + 1:
            raise Fault("a phase that this warpgroup did not see")
        self.own.seen[id(barrier)] = seen + 1

    def barrier_arrive(self, ref):
        """At the barriers of all programs: those of a cluster are all that programs arrive at."""
        for p in self.programs:
            self.send(p, functools.partial(one(ref, p).change, 1, 0))
        self.give_way()

    def copy_gmem_to_smem(self, source, target, barrier, collective_axes=()):
        size = target.view().nbytes
        barrier.view().change(1, size)
        share, targets = 1, [self.own.key[0]]
        mine = slice(None)
        if collective_axes:
            share, targets = len(self.programs), list(self.programs)
            rows = target.shape[0] // share
            mine = slice(self.own.key[0] * rows, (self.own.key[0] + 1) * rows)
        self.loaded += size // share
        for p in targets:

            def arrives(p=p):
                target.view(p)[mine] = source.view()[mine]
                barrier.view(p).change(0, -size // share)

            self.send(p, arrives)
        self.give_way()

    def commit_smem(self):
        writes.unfenced = False

    def copy_smem_to_gmem(self, source, target):
        if getattr(writes, "unfenced", False):
            raise Fault("a copy without a fence")
        stores = self.own.stores

        def arrives():
            target.view()[...] = source.view()
            stores.pop()

        stores.append(target)
        self.send(self.own.key[0], arrives)
        self.give_way()

    def wait_smem_to_gmem(self, count, wait_read_only=False):
        stores = self.own.stores
        self.give_way(lambda: len(stores) <= count)

    def wgmma(self, accumulator, a, b):
        self.own.products.append((accumulator, a, b))

    def wgmma_wait(self, count):
        self.give_way()
        while len(self.own.products) > count:
            accumulator, a, b = self.own.products.pop(0)
            a, b = (x.view() if isinstance(x, Ref) else np.asarray(x) for x in (a, b))
            accumulator.value += a.astype(np.float32) @ b.astype(np.float32)

    def run_state(self, f):
        def run(accumulators):
            f(accumulators)
            self.wgmma_wait(0)
            return jax.tree.map(lambda x: jnp.asarray(x.value), accumulators)

        return run

    def kernel(
        self, body, out_type, grid, grid_names, num_threads, scratch_types, cluster=(1,), **_
    ):
        def call(*given):
            found = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), out_type)
            arrays = *jax.tree.map(np.asarray, given), *found
            for place in np.ndindex(*grid):
                coordinates = dict(zip(grid_names, place, strict=True))
                self.run(body, coordinates, cluster[0], num_threads, scratch_types, arrays)
            return found

        return call


def patched(module, **others):
    own = {name: getattr(module, name) for name in dir(module)}
    return types.SimpleNamespace(**(own | others))


def loop(start, end):
    """`pl.loop`, unrolled."""

    def run(f):
        for n in range(start, end):
            f(n)

    return run


def fori_loop(start, end, f, carry):
    for n in range(start, end):
        carry = f(n, carry)
    return carry


def install(monkeypatch, module, *others, seed):
    """The machine, of this seed, that programs of these modules run on from now on."""
    machine = Machine(seed)

    def accumulator(shape, dtype):
        return Accumulator(machine, np.zeros(shape, dtype))

    accumulator.init = functools.partial(Accumulator, machine)
    gpu = patched(
        module.gpu,
        **{name: getattr(machine, name) for name in vars(Machine) if hasattr(module.gpu, name)},
        SMEM=lambda shape, dtype, **_: ("array", shape, dtype),
        Barrier=lambda num_arrivals=1, num_barriers=1: ("own", num_arrivals, num_barriers),
        ClusterBarrier=lambda collective_axes, num_arrivals, num_barriers: (
            "cluster",
            num_arrivals,
            num_barriers,
        ),
        ACC=accumulator,
        transpose_ref=Ref.transpose,
        set_max_registers=lambda *_, **__: None,
        load=lambda ref, *_, **__: ref[...],
        layout_cast=lambda x, layout: x,
        broadcasted_iota=lambda *how, layout: jax.lax.broadcasted_iota(*how),
    )
    lax = patched(
        jax.lax,
        axis_index=lambda name: machine.own.coordinates[name],
        cond=lambda which, yes, no: yes() if which else no(),
        fori_loop=fori_loop,
    )
    when = lambda condition: lambda f: f() if condition else None  # noqa: E731
    run_scoped = lambda f, accumulator: f(accumulator)  # noqa: E731
    pallas = patched(pl, loop=loop, when=when, run_state=machine.run_state, run_scoped=run_scoped)
    monkeypatch.setattr(module, "pl", pallas)
    for one in (module, *others):
        monkeypatch.setattr(one, "gpu", gpu)
        monkeypatch.setattr(one, "jax", patched(jax, lax=lax))
    return machine
