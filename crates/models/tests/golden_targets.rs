//! Targets against transformers: every folder of `golden/data/targets`, run by the CPU executor.
//!
//! Job: residual streams after every layer and logits of packed samples within per-element bounds; a sample alone gives what it gives
//! packed; decoding over caches, chunk by chunk and token by token, gives the features and picks of the packed pass; capture writes the
//! same features into a slot. Refuses skipping: a kind of target without golden values fails here.

#[path = "support/machine.rs"]
mod machine;

use drafthorse_cpu::FrozenSet;
use drafthorse_graph::{DType, Executor, HostMut, Program, Role, SlotArg};
use drafthorse_models::checkpoint::Checkpoint;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::target::{DecodePass, DecodePasses, Target};
use drafthorse_models::tensor_names::target_sources;
use drafthorse_testkit::compare::{Bound, compare};
use drafthorse_testkit::golden::{Golden, golden_dir};
use machine::Machine;
use std::sync::Arc;

/// Rows of the packed pass: more than the samples fill.
const BUDGET: usize = 32;
/// Sample slots of the packed pass: more than there are samples.
const MAX_ROWS: usize = 5;
/// Rows of a prefill chunk; divides no sample's length.
const PREFILL_ROWS: usize = 5;
/// Rows of the caches and positions of the RoPE tables: past the depth at which matrix products are cut into blocks.
const LONG: usize = 1100;
/// Rows of a verify pass.
const VERIFY_ROWS: usize = 4;

struct Subject {
    name: String,
    config: TargetConfig,
    frozen: FrozenSet,
    golden: Golden,
    tokens: Vec<i32>,
    cu: Vec<usize>,
}

fn subjects() -> Vec<Subject> {
    let folder = golden_dir().join("targets");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.file_type().unwrap().is_dir())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    assert!(names.len() >= 8, "golden targets: {names:?}");
    names.into_iter().map(|name| subject(&folder.join(&name), name)).collect()
}

fn subject(folder: &std::path::Path, name: String) -> Subject {
    let config = TargetConfig::open(folder).unwrap();
    let (checkpoint, extras) = Checkpoint::open_target(folder, &config).unwrap();
    assert!(extras.is_empty(), "{name}: {extras:?}");
    let mut frozen = FrozenSet::new();
    for fused in target_sources(&config) {
        let mut data = vec![f32::NAN; fused.elements()];
        checkpoint.read_f32(&fused, &mut data).unwrap();
        frozen.insert(format!("target.{}", fused.name), Arc::new(data));
    }
    let (cos, sin) = config.rope.tables(LONG);
    frozen.insert("target.rope.cos".into(), Arc::new(cos));
    frozen.insert("target.rope.sin".into(), Arc::new(sin));
    let golden = Golden::load(&format!("targets/{name}-expected")).unwrap();
    let tokens = golden.tensor("token_ids").unwrap().ints();
    let cu = golden.tensor("cu_seqlens").unwrap().ints().into_iter().map(|c| c as usize).collect();
    Subject { name, config, frozen, golden, tokens, cu }
}

/// Streams after each layer and logits, rows of the samples only.
struct Packed {
    streams: Vec<Vec<f32>>,
    logits: Vec<f32>,
}

impl Subject {
    /// Runs the packed pass over samples given as ranges of the golden tokens.
    fn packed(&self, samples: &[std::ops::Range<usize>]) -> Packed {
        let mut program = Program::new(DType::F32);
        let target = Target::declare(&mut program, &self.config, LONG);
        let (phase, inputs, streams, logits) = target.inspection_pass(&mut program, BUDGET, MAX_ROWS);
        let mut m = Machine::new(program, &self.frozen);
        let rows = self.write_packed(&mut m, inputs, samples);
        m.run(phase);
        let take = |m: &mut Machine, t, cols: usize| m.get(t)[..rows * cols].to_vec();
        let streams = streams.into_iter().map(|t| take(&mut m, t, self.config.hidden)).collect();
        Packed { streams, logits: take(&mut m, logits, self.config.vocab) }
    }

    fn write_packed(
        &self,
        m: &mut Machine,
        inputs: drafthorse_models::target::PackedInputs,
        samples: &[std::ops::Range<usize>],
    ) -> usize {
        let (mut tokens, mut positions, mut cu) = (Vec::new(), Vec::new(), vec![0]);
        for s in samples {
            tokens.extend_from_slice(&self.tokens[s.clone()]);
            positions.extend(0..s.len() as i32);
            cu.push(tokens.len() as i32);
        }
        let rows = tokens.len();
        tokens.resize(BUDGET, 0);
        positions.resize(BUDGET, 0);
        cu.resize(MAX_ROWS + 1, rows as i32);
        m.set_ints(inputs.tokens, &tokens);
        m.set_ints(inputs.positions, &positions);
        m.set_ints(inputs.cu_seqlens, &cu);
        m.set_ints(inputs.n_seqs, &[samples.len() as i32]);
        rows
    }

    fn samples(&self) -> Vec<std::ops::Range<usize>> {
        self.cu.windows(2).map(|w| w[0]..w[1]).collect()
    }

    fn layer_ids(&self) -> Vec<usize> {
        if self.config.layers > 2 { vec![0, self.config.layers - 2] } else { vec![0] }
    }

    /// Rows of the captured features of the packed pass, `[rows, n·H]`.
    fn features(&self, packed: &Packed) -> Vec<f32> {
        let h = self.config.hidden;
        (0..self.tokens.len())
            .flat_map(|r| self.layer_ids().into_iter().map(move |l| (r, l)))
            .flat_map(|(r, l)| packed.streams[l][r * h..(r + 1) * h].iter().copied())
            .collect()
    }
}

/// Both sides computed in fp32: an element may be off by sixteen ulps of its row's size for each layer before it.
fn row_bounds(want: &[f64], cols: usize, layers: usize) -> Vec<f64> {
    want.chunks(cols)
        .flat_map(|row| {
            let rms = (row.iter().map(|x| x * x).sum::<f64>() / cols as f64).sqrt();
            let ulp = 1.0 / (1u64 << 23) as f64;
            row.iter().map(move |x| ulp * (2.0 * x.abs() + 16.0 * (layers + 1) as f64 * rms)).collect::<Vec<_>>()
        })
        .collect()
}

fn near(name: &str, got: &[f32], want: &[f64], cols: usize, layers: usize) {
    let bounds = row_bounds(want, cols, layers);
    compare(name, &[want.len() / cols, cols], got, want, Bound::PerElement(&bounds)).unwrap_or_else(|e| panic!("{e}"));
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

#[test]
fn streams_and_logits_agree_with_transformers() {
    for s in subjects() {
        let inv_freq = s.golden.tensor("inv_freq").unwrap();
        let ulp = Bound::AbsRel { abs: 0.0, rel: 1.0 / (1u64 << 22) as f64 };
        compare("inv_freq", &inv_freq.shape, &s.config.rope.inv_freq(), &inv_freq.data, ulp)
            .unwrap_or_else(|e| panic!("{}: {e}", s.name));
        let got = s.packed(&s.samples());
        for (l, stream) in got.streams.iter().enumerate() {
            let want = s.golden.tensor(&format!("hidden.{l}")).unwrap();
            near(&format!("{} hidden.{l}", s.name), stream, &want.data, s.config.hidden, l);
        }
        let want = s.golden.tensor("logits").unwrap();
        near(&format!("{} logits", s.name), &got.logits, &want.data, s.config.vocab, s.config.layers);
        // The bounds are narrow enough to see one element that is off by a thousandth.
        let mut wrong = got.logits.clone();
        wrong[7] *= 1.001;
        let bounds = row_bounds(&want.data, s.config.vocab, s.config.layers);
        assert!(compare("logits", &want.shape, &wrong, &want.data, Bound::PerElement(&bounds)).is_err());
    }
}

#[test]
fn a_sample_alone_gives_what_it_gives_packed() {
    for s in subjects() {
        let all = s.packed(&s.samples());
        for range in s.samples() {
            let alone = s.packed(std::slice::from_ref(&range));
            let (h, v) = (s.config.hidden, s.config.vocab);
            for (l, (alone, all)) in alone.streams.iter().zip(&all.streams).enumerate() {
                near(&format!("{} alone {l}", s.name), alone, &wide(&all[range.start * h..range.end * h]), h, l);
            }
            near(
                &format!("{} alone logits", s.name),
                &alone.logits,
                &wide(&all.logits[range.start * v..range.end * v]),
                v,
                s.config.layers,
            );
        }
    }
}

#[test]
fn capture_fills_the_slot_with_the_streams() {
    for s in subjects() {
        let ids = s.layer_ids();
        let width = ids.len() * s.config.hidden;
        let mut program = Program::new(DType::F32);
        let slot = program.tensor("slot", &[BUDGET, width], DType::F32, Role::Slot);
        let target = Target::declare(&mut program, &s.config, LONG);
        let pass = target.capture_pass(&mut program, BUDGET, MAX_ROWS, &ids, slot);
        let mut m = Machine::new(program, &s.frozen);
        let rows = s.write_packed(&mut m, pass.inputs, &s.samples());
        let mut buffer = m.exec.new_slot().unwrap();
        buffer.fill(f32::NAN);
        m.exec.run(pass.phase, SlotArg::Write(&mut buffer)).unwrap();
        // The same ops on the same numbers in the same order: equal, not close.
        assert_eq!(buffer[..rows * width], s.features(&s.packed(&s.samples()))[..], "{}", s.name);
        assert!(buffer.iter().all(|x| x.is_finite()), "{}: padded rows are written too", s.name);
    }
}

/// A decoding machine over one target.
struct Decoder<'a> {
    subject: &'a Subject,
    m: Machine,
    passes: DecodePasses,
    len: usize,
}

/// What the rows of a pass gave: features and, of a verify pass, argmax and the two largest logits.
#[derive(Clone, Debug, Default, PartialEq)]
struct Rows {
    features: Vec<f32>,
    argmax: Vec<i32>,
    top2: Vec<f32>,
}

impl<'a> Decoder<'a> {
    fn new(subject: &'a Subject) -> Self {
        let mut program = Program::new(DType::F32);
        let target = Target::declare(&mut program, &subject.config, LONG);
        let passes = target.decode_passes(&mut program, LONG, PREFILL_ROWS, VERIFY_ROWS, &subject.layer_ids());
        let mut m = Machine::new(program, &subject.frozen);
        m.set(passes.temperature, &[0.0]);
        m.set(passes.uniform, &[0.0; VERIFY_ROWS]);
        m.set_ints(passes.probe, &[-1; VERIFY_ROWS]);
        Decoder { subject, m, passes, len: 0 }
    }

    /// Runs one pass over `tokens`, which may be fewer than its rows: the others hold token 0 and are overwritten by the next append.
    fn pass(&mut self, verify: bool, tokens: &[i32]) -> Rows {
        let passes = &self.passes;
        let pass: &DecodePass = if verify { &passes.verify } else { &passes.prefill };
        assert!(tokens.len() <= pass.rows);
        let mut ids = tokens.to_vec();
        ids.resize(pass.rows, 0);
        let positions: Vec<i32> = (0..pass.rows).map(|r| (self.len + r) as i32).collect();
        self.m.set_ints(passes.len, &[self.len as i32]);
        self.m.set_ints(pass.tokens, &ids);
        self.m.set_ints(pass.positions, &positions);
        self.m.run(pass.phase);
        let width = self.subject.layer_ids().len() * self.subject.config.hidden;
        let mut rows = Rows { features: self.m.get(pass.features)[..tokens.len() * width].to_vec(), ..Rows::default() };
        if verify {
            let mut argmax = [0; VERIFY_ROWS];
            self.m.exec.read(passes.picks.argmax, HostMut::I32(&mut argmax)).unwrap();
            rows.argmax = argmax[..tokens.len()].to_vec();
            rows.top2 = self.m.get(passes.picks.top2)[..2 * tokens.len()].to_vec();
        }
        self.len += tokens.len();
        rows
    }

    fn passes(&mut self, verify: bool, tokens: &[i32], chunk: usize) -> Rows {
        let mut all = Rows::default();
        for tokens in tokens.chunks(chunk) {
            let rows = self.pass(verify, tokens);
            all.features.extend(rows.features);
            all.argmax.extend(rows.argmax);
            all.top2.extend(rows.top2);
        }
        all
    }
}

#[test]
fn decoding_gives_the_features_and_picks_of_the_packed_pass() {
    for s in subjects() {
        let packed = s.packed(&s.samples());
        let (width, v) = (s.layer_ids().len() * s.config.hidden, s.config.vocab);
        let features = s.features(&packed);
        for range in s.samples() {
            let tokens = &s.tokens[range.clone()];
            let half = tokens.len() / 2;
            // (verified from, rows of a verify pass): everything at once or token by token, after a prefill or without one.
            for (from, chunk) in [(0, VERIFY_ROWS), (0, 1), (half, VERIFY_ROWS), (half, 1)] {
                let what = format!("{} {range:?} verified from {from} by {chunk}", s.name);
                let mut decoder = Decoder::new(&s);
                let mut got = decoder.passes(false, &tokens[..from], PREFILL_ROWS);
                let verified = decoder.passes(true, &tokens[from..], chunk);
                got.features.extend(&verified.features);
                near(
                    &format!("{what}: features"),
                    &got.features,
                    &wide(&features[range.start * width..range.end * width]),
                    width,
                    s.config.layers,
                );
                for (i, row) in (range.start + from..range.end).enumerate() {
                    let logits = &packed.logits[row * v..(row + 1) * v];
                    let mut order: Vec<usize> = (0..v).collect();
                    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
                    assert!(logits[order[0]] - logits[order[1]] > 1e-4, "{what}: row {row} is a tie and proves nothing");
                    assert_eq!(verified.argmax[i], order[0] as i32, "{what}: argmax of row {row}");
                    for j in 0..2 {
                        let (got, want) = (verified.top2[2 * i + j], logits[order[j]]);
                        assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{what}: top2 of row {row}: {got} {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_verified_with_it() {
    for s in subjects() {
        let tokens = &s.tokens[s.samples()[0].clone()];
        // Plain decoding is the verify pass with one valid row: greedy output of the two must be equal, so the bits must be.
        let mut together = Decoder::new(&s);
        let mut single = Decoder::new(&s);
        assert_eq!(together.passes(true, tokens, VERIFY_ROWS), single.passes(true, tokens, 1), "{}", s.name);
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_verified_with_it_after_a_long_prefix() {
    for s in subjects().into_iter().filter(|s| s.name == "qwen3_default") {
        let tokens: Vec<i32> = (0..LONG).map(|i| (i * i * 7 + i * 31) as i32 % s.config.vocab as i32).collect();
        let (mut together, mut single) = (Decoder::new(&s), Decoder::new(&s));
        for from in [126, 254, 510, 1022] {
            for decoder in [&mut together, &mut single] {
                let start = decoder.len;
                decoder.passes(false, &tokens[start..from], PREFILL_ROWS);
            }
            let rows = &tokens[from..from + VERIFY_ROWS];
            assert_eq!(together.passes(true, rows, VERIFY_ROWS), single.passes(true, rows, 1), "after {from} tokens");
        }
    }
}

#[test]
fn rejected_rows_leave_no_trace() {
    for s in subjects() {
        let tokens = &s.tokens[s.samples()[0].clone()];
        let mut plain = Decoder::new(&s);
        let want = plain.passes(true, tokens, VERIFY_ROWS);
        let mut cropped = Decoder::new(&s);
        let mut got = cropped.passes(true, &tokens[..3], VERIFY_ROWS);
        let wrong: Vec<i32> = tokens[3..6].iter().map(|t| (t + 1) % s.config.vocab as i32).collect();
        let rejected = cropped.pass(true, &wrong);
        assert_ne!(rejected.top2, want.top2[6..12], "{}: other tokens give other logits", s.name);
        cropped.len = 3;
        let rest = cropped.passes(true, &tokens[3..], 1);
        got.features.extend(rest.features);
        got.argmax.extend(rest.argmax);
        got.top2.extend(rest.top2);
        assert_eq!(got, want, "{}", s.name);
    }
}
