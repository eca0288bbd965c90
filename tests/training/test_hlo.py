"""Reading the text of a compiled program: loops, branches, what is fused, what is sent."""

import pytest

from mhe_jax.analysis.hlo import Program, collectives_of


def sent(count: int, size: int, largest: int) -> dict[str, int]:
    return {"count": count, "bytes": size, "largest": largest}


# Two nested loops, of 3 turns as the compiler says and of 4 as their numbers say: 0, 2, 4, 6 < 7.
LOOPS = """HloModule nested, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused (p: f32[5,7]) -> f32[5,7] {
  %p = f32[5,7]{1,0:T(8,128)} parameter(0)
  ROOT %twice = f32[5,7]{1,0:T(8,128)} add(%p, %p), backend_config={"estimated_cycles":"1000"}
}

%inner_condition (c: (s32[], f32[5,7])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[5,7]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %at = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%inner_body (b: (s32[], f32[5,7])) -> (s32[], f32[5,7]) {
  %b = (s32[]{:T(128)}, f32[5,7]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %held = s32[]{:T(128)} copy(%i)
  %step = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%held, %step)
  %v = f32[5,7]{1,0:T(8,128)} get-tuple-element(%b), index=1
  %r = f32[5,7]{1,0:T(8,128)} all-reduce(%v), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %f = f32[5,7]{1,0:T(8,128)} fusion(%r), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"11"}}
  ROOT %out = (s32[]{:T(128)}, f32[5,7]{1,0:T(8,128)}) tuple(%next, %f)
}

%outer_condition (c: (s32[], f32[5,7])) -> pred[] {
  %c = (s32[], f32[5,7]{1,0}) parameter(0)
  ROOT %go = pred[] custom-call(%c), custom_call_target="go"
}

%outer_body (b: (s32[], f32[5,7])) -> (s32[], f32[5,7]) {
  %b = (s32[], f32[5,7]{1,0:T(8,128)}) parameter(0)
  %zero = s32[] constant(0)
  %v = f32[5,7]{1,0:T(8,128)} get-tuple-element(%b), index=1
  %start = (s32[], f32[5,7]{1,0:T(8,128)}) tuple(%zero, %v)
  %loop = (s32[], f32[5,7]{1,0:T(8,128)}) while(%start), condition=%inner_condition, \
body=%inner_body
  %w = f32[5,7]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %f = f32[5,7]{1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out = (s32[], f32[5,7]{1,0:T(8,128)}) tuple(%zero, %f)
}

ENTRY %main (a: f32[5,7]) -> f32[5,7] {
  %a = f32[5,7]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[5,7]{1,0:T(8,128)}) tuple(%zero, %a)
  %loop = (s32[], f32[5,7]{1,0:T(8,128)}) while(%start), condition=%outer_condition, \
body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %w = f32[5,7]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_loops_count_as_often_as_they_run():
    program = Program(LOOPS)
    array = 4 * 5 * 7
    assert collectives_of(program) == {"all-reduce": sent(12, 12 * array, array)}
    # What stands inside a fusion is not the fusion's own estimate.
    assert program.cycles() == 3 * (4 * 11 + 100)


def test_a_loop_of_unknown_length_counts_once():
    program = Program(LOOPS.replace('"known_trip_count":{"n":"3"}', ""))
    assert program.cycles() == 4 * 11 + 100


def test_no_estimate_is_not_zero():
    assert Program(LOOPS.replace("estimated_cycles", "other")).cycles() is None


ENTRY = """HloModule sent

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{computations}

ENTRY %main (a: f32[8,3], b: bf16[2,3]) -> f32[8,3] {{
  %a = f32[8,3]{{1,0:T(8,128)S(1)}} parameter(0)
  %b = bf16[2,3]{{1,0:T(8,128)(2,1)}} parameter(1)
{lines}
  ROOT %out = f32[8,3]{{1,0}} copy(%a)
}}
"""


def entry(*lines: str, computations: str = "") -> Program:
    return Program(ENTRY.format(lines="\n".join(lines), computations=computations))


A, B = 4 * 8 * 3, 2 * 2 * 3


@pytest.mark.parametrize(
    ("lines", "kind", "want"),
    [
        # An array that is gathered counts as what comes out, any other as what goes in.
        (
            ["  %g = bf16[8,3]{1,0} all-gather(%b), replica_groups=[2,4]<=[8], dimensions={0}"],
            "all-gather",
            sent(1, 4 * B, 4 * B),
        ),
        (
            ["  %r = f32[2,3]{1,0} reduce-scatter(%a), dimensions={0}, to_apply=%add"],
            "reduce-scatter",
            sent(1, A, A),
        ),
        # Several arrays at once.
        (
            ["  %r = (f32[8,3]{1,0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%a, %b), to_apply=%add"],
            "all-reduce",
            sent(1, A + B, A),
        ),
        # A start has a tuple of what goes in and what comes out, and its done is not another.
        (
            [
                "  %s = ((bf16[2,3]{1,0}, f32[8,3]{1,0}), (bf16[8,3]{1,0}, f32[32,3]{1,0})) "
                "all-gather-start(%b, %a)",
                "  %d = (bf16[8,3]{1,0}, f32[32,3]{1,0}) all-gather-done(%s)",
            ],
            "all-gather",
            sent(1, 4 * B + 4 * A, 4 * A),
        ),
        (
            [
                "  %s = (f32[8,3]{1,0}, f32[8,3]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
                "collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
                "  %d = f32[8,3]{1,0} collective-permute-done(%s)",
            ],
            "collective-permute",
            sent(1, A, A),
        ),
        # Parts that go to other slices; what is sent to the host for another reason is none.
        (
            [
                "  %t = token[] after-all()",
                "  %s = (f32[8,3]{1,0}, u32[], token[]) send(%a, %t), channel_id=2, "
                'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}',
                "  %d = token[] send-done(%s), channel_id=2",
                "  %o = (f32[8,3]{1,0}, u32[], token[]) send(%a, %t), channel_id=3",
            ],
            "between-slices",
            sent(1, A, A),
        ),
    ],
)
def test_bytes(lines, kind, want):
    assert collectives_of(entry(*lines)) == {kind: want}


FUSED = """%{name} (p: f32[8,3]) -> f32[2,3] {{
  %p = f32[8,3]{{1,0}} parameter(0)
  %r = f32[8,3]{{1,0}} all-reduce(%p), channel_id={channel}, to_apply=%add
  %at = s32[] constant(0)
  ROOT %part = f32[2,3]{{1,0}} dynamic-slice(%r, %at, %at), dynamic_slice_sizes={{2,3}}
}}
"""


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    program = entry(
        "  %f = f32[2,3]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1",
        computations=FUSED.format(name="all-reduce-scatter.1", channel=7),
    )
    assert collectives_of(program) == {"reduce-scatter": sent(1, A, A)}


def test_one_collective_in_several_fusions_counts_once():
    lines = [
        "  %f = f32[2,3]{1,0} fusion(%a), kind=kCustom, calls=%first",
        "  %g = f32[2,3]{1,0} fusion(%a), kind=kCustom, calls=%second",
    ]
    parts = [FUSED.format(name=name, channel=7) for name in ("first", "second")]
    program = entry(*lines, computations="\n".join(parts))
    assert collectives_of(program) == {"all-reduce": sent(1, A, A)}
    other = entry(*lines, computations="\n".join([parts[0], parts[1].replace("7", "8")]))
    assert collectives_of(other) == {"all-reduce": sent(2, 2 * A, A)}


def test_a_reduce_scatter_and_the_gather_after_it_may_share_a_channel():
    program = entry(
        "  %r = f32[2,3]{1,0} reduce-scatter(%a), channel_id=4, dimensions={0}, to_apply=%add",
        "  %g = f32[8,3]{1,0} all-gather(%r), channel_id=4, dimensions={0}",
    )
    once = sent(1, A, A)
    assert collectives_of(program) == {"all-gather": once, "reduce-scatter": once}


BRANCHES = """%cheap (p: f32[8,3]) -> f32[8,3] {
  %p = f32[8,3]{1,0} parameter(0)
  ROOT %c = f32[8,3]{1,0} copy(%p), backend_config={"estimated_cycles":"5"}
}

%dear (p: f32[8,3]) -> f32[8,3] {
  %p = f32[8,3]{1,0} parameter(0)
  %r = f32[8,3]{1,0} all-reduce(%p), to_apply=%add
  ROOT %c = f32[8,3]{1,0} copy(%r), backend_config={"estimated_cycles":"70"}
}
"""


@pytest.mark.parametrize(
    "choice",
    [
        "branch_computations={%cheap, %dear}",
        "true_computation=%cheap, false_computation=%dear",
    ],
)
def test_one_branch_counts(choice):
    line = f"  %x = f32[8,3]{{1,0}} conditional(%a, %a, %a), {choice}"
    program = entry(line, computations=BRANCHES)
    assert program.cycles() == 5
    assert collectives_of(program) == {"all-reduce": sent(1, A, A)}


def test_what_a_call_or_an_async_start_runs_counts():
    program = entry(
        "  %x = f32[8,3]{1,0} call(%a), to_apply=%dear",
        "  %s = ((f32[8,3]{1,0}), f32[8,3]{1,0}) async-start(%a), calls=%dear",
        "  %d = f32[8,3]{1,0} async-done(%s)",
        computations=BRANCHES,
    )
    assert program.cycles() == 140
    assert collectives_of(program) == {"all-reduce": sent(2, 2 * A, A)}
