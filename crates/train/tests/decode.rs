//! Speculative decoding on a tiny target and a drafter that was trained for it: `golden/data/infer`.
//!
//! Job: at temperature 0 every pass of the six golden requests, which were computed without any cache; at temperature 1 and below the
//! distribution of sampled tokens against the target's own, with twins of the decoder that break acceptance and must be caught.
//! Refuses tolerances on tokens: the golden margins make them equal, not close.
#![cfg(not(shuttle))]

use drafthorse_cpu::CpuExecutor;
use drafthorse_graph::{DType, ExecError, Executor, Fetch, HostMut, HostRef, PhaseId, Program, SlotArg, TensorId};
use drafthorse_models::draft_config::TargetDims;
use drafthorse_models::draft_folder::DraftFolder;
use drafthorse_models::target::Target;
use drafthorse_train::decode::{Completion, Decoder, Origin, Request, decode_program};
use drafthorse_train::evaluate::{Report, Settings, evaluate};
use drafthorse_train::frozen::{Backend, CpuBackend, FrozenSource, TargetFiles};
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::state::folder_weights;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Longest prompt and completion together of the golden requests is 65 tokens: two prefill chunks are tested by a longer prompt.
const MAX_TOKENS: usize = 160;

#[derive(Deserialize)]
struct Golden {
    block: usize,
    requests: Vec<GoldenRequest>,
    tau_pooled: f64,
    tau_mean: f64,
}

#[derive(Deserialize)]
struct GoldenRequest {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    stop_token: Option<u32>,
    emitted: Vec<u32>,
    finish: String,
    passes: Vec<GoldenPass>,
    tau: f64,
}

#[derive(Deserialize)]
struct GoldenPass {
    accepted: usize,
    emitted: usize,
}

fn folder(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/data").join(part)
}

fn golden() -> Golden {
    let text = std::fs::read_to_string(folder("infer/decode.json")).expect("golden decoding");
    serde_json::from_str(&text).expect("golden decoding's format")
}

impl GoldenRequest {
    fn stop(&self) -> &[u32] {
        self.stop_token.as_slice()
    }

    fn request(&self) -> Request<'_> {
        greedy(&self.prompt, self.max_new_tokens, self.stop())
    }

    /// Tokens emitted by each pass had the limit been `limit` and `stop` the stop token: from the passes as they were.
    fn cut(&self, limit: usize, stop: u32) -> Vec<usize> {
        let end = self.emitted.iter().position(|&t| t == stop).map_or(limit, |at| limit.min(at + 1));
        assert!(end <= self.emitted.len(), "the golden completion is long enough to be cut");
        let (mut at, mut per_pass) = (1, Vec::new());
        for pass in &self.passes {
            if at < end {
                per_pass.push(pass.emitted.min(end - at));
            }
            at += pass.emitted;
        }
        per_pass
    }
}

fn greedy<'a>(prompt: &'a [u32], max_new_tokens: usize, stop: &'a [u32]) -> Request<'a> {
    Request { prompt, max_new_tokens, temperature: 0.0, stop, seed: 0, number: 0 }
}

/// The golden target and drafter, opened.
struct Models {
    backend: CpuBackend,
    target: TargetFiles,
    draft: DraftFolder,
}

impl Models {
    fn open() -> Models {
        let target = TargetFiles::open(&folder("targets/qwen3_default")).expect("the golden target");
        let draft = DraftFolder::open(&folder("infer/drafter"), TargetDims::from(&target.config)).expect("the golden drafter");
        Models { backend: CpuBackend::new(Some(1)).unwrap(), target, draft }
    }

    fn decoder(&self, max_tokens: usize) -> Decoder<CpuExecutor> {
        self.decoder_on(max_tokens, |exec, _| exec)
    }

    /// A decoder on what `wrap` makes of the executor.
    fn decoder_on<E: Executor>(&self, max_tokens: usize, wrap: impl FnOnce(CpuExecutor, &Program) -> E) -> Decoder<E> {
        let program = decode_program(DType::F32, &self.target.config, &self.draft.config, max_tokens);
        let source = FrozenSource { target: &self.target, draft: Some(&self.draft.config) };
        let exec = self.backend.executor(0, Arc::clone(&program.program), &source, &mut |_, _| {}).unwrap();
        let exec = wrap(exec, &program.program);
        let mut decoder = Decoder::new(exec, program).unwrap();
        decoder.load_drafter(&folder_weights(&self.draft).unwrap()).unwrap();
        decoder
    }

    /// The target's next-token probabilities after every token of every sequence, by one packed pass without caches.
    fn next_token(&self, sequences: &[Vec<u32>], temperature: f64) -> Vec<Vec<Vec<f64>>> {
        let (rows, longest) = (sequences.iter().map(Vec::len).sum(), sequences.iter().map(Vec::len).max().unwrap());
        let mut program = Program::new(DType::F32);
        let target = Target::declare(&mut program, &self.target.config, longest);
        let (phase, inputs, _, logits) = target.inspection_pass(&mut program, rows, sequences.len());
        let source = FrozenSource { target: &self.target, draft: None };
        let mut exec = self.backend.executor(0, Arc::new(program), &source, &mut |_, _| {}).unwrap();
        let (mut tokens, mut positions, mut cu) = (Vec::new(), Vec::new(), vec![0]);
        for s in sequences {
            tokens.extend(s.iter().map(|&t| t as i32));
            positions.extend(0..s.len() as i32);
            cu.push(tokens.len() as i32);
        }
        exec.write(inputs.tokens, HostRef::I32(&tokens)).unwrap();
        exec.write(inputs.positions, HostRef::I32(&positions)).unwrap();
        exec.write(inputs.cu_seqlens, HostRef::I32(&cu)).unwrap();
        exec.write(inputs.n_seqs, HostRef::I32(&[sequences.len() as i32])).unwrap();
        exec.run(phase, SlotArg::None).unwrap();
        let vocab = self.target.config.vocab;
        let mut z = vec![0.0; rows * vocab];
        exec.read(logits, HostMut::F32(&mut z)).unwrap();
        let mut rows = z.chunks(vocab).map(|z| softmax(z, temperature));
        sequences.iter().map(|s| rows.by_ref().take(s.len()).collect()).collect()
    }
}

fn softmax(z: &[f32], temperature: f64) -> Vec<f64> {
    let top = f64::from(z.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let masses: Vec<f64> = z.iter().map(|&z| ((f64::from(z) - top) / temperature).exp()).collect();
    let total: f64 = masses.iter().sum();
    masses.iter().map(|m| m / total).collect()
}

/// What must hold of any completion with drafts.
fn check_bookkeeping(c: &Completion) {
    let drafts = c.emitted.iter().filter(|e| matches!(e.origin, Origin::Draft(_))).count();
    assert_eq!(c.accepted.iter().sum::<u64>() as usize, drafts);
    let mut at = 0;
    for (i, e) in c.emitted.iter().enumerate() {
        assert_eq!(e.origin == Origin::Prefill, i == 0, "the first token alone is the prefill's");
        if let Origin::Draft(slot) = e.origin {
            let starts: Vec<usize> = c.per_pass.iter().scan(1, |at, n| Some(std::mem::replace(at, *at + n))).collect();
            let start = starts.iter().rev().find(|&&s| s <= i).unwrap();
            assert_eq!(slot, i - start + 1, "a draft's slot is its place in its pass");
        }
        at += 1;
    }
    assert_eq!(at, c.emitted.len());
    assert_eq!(c.verified_tokens(), c.emitted.len().saturating_sub(1));
}

#[test]
fn six_requests_decode_pass_by_pass_as_without_any_cache() {
    let (golden, models) = (golden(), Models::open());
    assert_eq!(golden.block, models.draft.config.block_size);
    assert_eq!(golden.requests.len(), 6);
    let mut decoder = models.decoder(MAX_TOKENS);
    let (mut cut_by_limit, mut cut_by_stop) = (0, 0);
    for (number, want) in golden.requests.iter().enumerate() {
        let got = decoder.speculate(&want.request()).unwrap();
        assert_eq!(got.tokens(), want.emitted, "request {number}");
        assert_eq!(got.per_pass, want.passes.iter().map(|p| p.emitted).collect::<Vec<_>>(), "request {number}");
        assert_eq!(got.stopped, want.finish == "stop", "request {number}");
        check_bookkeeping(&got);
        for slot in 0..golden.block - 1 {
            let accepted = want.passes.iter().filter(|p| p.accepted > slot && p.emitted > slot).count();
            assert_eq!(got.accepted[slot], accepted as u64, "request {number}, slot {}", slot + 1);
        }
        for (e, next) in got.emitted.iter().zip(&want.emitted) {
            assert!(e.token == *next && e.top2[0] - e.top2[1] > 9e-4, "golden margins are at least 1e-3: {e:?}");
        }
        let last = want.passes.last().unwrap();
        cut_by_limit += usize::from(!got.stopped && last.emitted <= last.accepted);
        cut_by_stop += usize::from(got.stopped && last.emitted <= last.accepted);

        let plain = decoder.plain(&want.request()).unwrap();
        assert_eq!(plain.tokens(), want.emitted, "request {number}, plain");
        assert_eq!(plain.per_pass, vec![1; want.emitted.len() - 1]);
        assert!(plain.accepted.iter().all(|&a| a == 0));
        assert_eq!(plain.stopped, got.stopped);
        // One row or many in a verify pass: the CPU sums a row in the same order, so that even the logits are equal.
        for (a, b) in plain.emitted.iter().zip(&got.emitted) {
            assert_eq!(a.top2, b.top2);
        }
    }
    assert!(
        cut_by_limit >= 2 && cut_by_stop == 1,
        "the limit ({cut_by_limit}) and a stop token ({cut_by_stop}) fall inside a pass"
    );
}

fn settings(max_new_tokens: usize) -> Settings {
    Settings { max_new_tokens, temperature: 0.0, seed: 0, prove: true }
}

fn report(decoder: &mut Decoder<CpuExecutor>, prompts: &[Vec<u32>], stop: &[u32], settings: &Settings) -> Report {
    evaluate(decoder, prompts, stop, settings, &Cancel::new(), &mut |_, _, _| {}).unwrap()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn evaluation_gives_the_golden_acceptance_lengths_and_its_proof_holds() {
    let (golden, models) = (golden(), Models::open());
    let mut decoder = models.decoder(MAX_TOKENS);
    // Limits and stop tokens differ between the golden requests: one evaluation each, pooled here.
    let reports: Vec<Report> = golden
        .requests
        .iter()
        .map(|r| report(&mut decoder, std::slice::from_ref(&r.prompt), r.stop(), &settings(r.max_new_tokens)))
        .collect();
    for (r, want) in reports.iter().zip(&golden.requests) {
        assert!((r.tau - want.tau).abs() < 1e-12 && r.prompts[0].tau == Some(r.tau), "{} {}", r.tau, want.tau);
        assert_eq!(r.proof.as_ref().map(|p| (p.equal, p.ties, p.different.len())), Some((1, 0, 0)));
    }
    let (tokens, passes) = reports.iter().fold((0, 0), |(t, p), r| (t + r.tokens, p + r.target_passes));
    assert!((tokens as f64 / passes as f64 - golden.tau_pooled).abs() < 1e-12);
    assert!((mean(&reports.iter().map(|r| r.tau).collect::<Vec<_>>()) - golden.tau_mean).abs() < 1e-12);

    // All six in one evaluation under one limit and one stop token: the golden passes, cut there.
    let (limit, stop) = (24, golden.requests[5].stop_token.unwrap());
    let prompts: Vec<Vec<u32>> = golden.requests.iter().map(|r| r.prompt.clone()).collect();
    let all = report(&mut decoder, &prompts, &[stop], &settings(limit));
    let cut: Vec<Vec<usize>> = golden.requests.iter().map(|r| r.cut(limit, stop)).collect();
    let (tokens, passes) = (cut.iter().flatten().sum::<usize>(), cut.iter().map(Vec::len).sum::<usize>());
    assert_eq!((all.tokens, all.target_passes), (tokens, passes));
    assert!((all.tau - tokens as f64 / passes as f64).abs() < 1e-12);
    let taus: Vec<f64> = cut.iter().map(|c| c.iter().sum::<usize>() as f64 / c.len() as f64).collect();
    assert!((all.tau_mean - mean(&taus)).abs() < 1e-12);
    assert!((all.tau - all.tau_mean).abs() > 0.1, "pooled and mean are told apart");
    assert_eq!(all.proof.as_ref().map(|p| (p.equal, p.ties, p.different.len())), Some((6, 0, 0)));
    // Tokens of verify passes are accepted drafts and one token of the target per pass, but for passes that were cut.
    let whole = 1.0 + all.slot_acceptance.iter().sum::<f64>();
    assert!(all.tau <= whole && whole < all.tau + 6.0 / passes as f64, "{} {whole}", all.tau);
    assert_eq!(report(&mut decoder, &prompts, &[stop], &Settings { prove: false, ..settings(limit) }).proof, None);
}

/// A prompt of `n` tokens that no golden request has.
fn long_prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| 1 + (i * 37 + i / 5) % 127).collect()
}

#[test]
fn what_came_before_leaves_no_trace_in_the_caches() {
    let (golden, models) = (golden(), Models::open());
    let (a, b) = (golden.requests[2].request(), long_prompt(100));
    let b = greedy(&b, 40, &[]);
    let mut decoder = models.decoder(MAX_TOKENS);
    let first = (decoder.speculate(&a).unwrap(), decoder.speculate(&b).unwrap());
    assert!(first.0.per_pass.iter().any(|&n| n < golden.block), "drafts were rejected");
    for _ in 0..2 {
        assert_eq!(decoder.speculate(&a).unwrap(), first.0);
        decoder.plain(&b).unwrap();
        assert_eq!(decoder.speculate(&b).unwrap(), first.1);
    }
    assert_eq!(models.decoder(MAX_TOKENS).speculate(&b).unwrap(), first.1, "a fresh decoder gives the same");

    // The completion's own first half as prompt: caches filled by prefill instead of verify passes. 100 tokens take two prefill chunks.
    let mut joined = b.prompt.to_vec();
    joined.extend(&first.1.tokens()[..20]);
    assert_eq!(decoder.speculate(&greedy(&joined, 20, &[])).unwrap().tokens(), first.1.tokens()[20..]);
    assert_eq!(decoder.plain(&b).unwrap().tokens(), first.1.tokens());
}

#[test]
fn prompts_and_completions_of_every_length_up_to_the_bound() {
    let models = Models::open();
    let mut decoder = models.decoder(70);
    assert_eq!(decoder.max_tokens(), 70);
    for n in [1, 2, 63, 64, 65, 66, 69, 70] {
        let prompt = long_prompt(n);
        let room = 70 - n as usize;
        let whole = decoder.speculate(&greedy(&prompt, 1000, &[])).unwrap();
        assert_eq!(whole.emitted.len(), room, "prompt and completion fill the bound");
        check_bookkeeping(&whole);
        assert_eq!(decoder.plain(&greedy(&prompt, 1000, &[])).unwrap().tokens(), whole.tokens());
        for limit in [0, 1, 2, 5] {
            let cut = decoder.speculate(&greedy(&prompt, limit, &[])).unwrap();
            assert_eq!(cut.tokens(), whole.tokens()[..limit.min(room)], "a limit cuts and changes nothing else");
            assert_eq!(cut.passes() == 0, limit.min(room) < 2, "the prefill's own token takes no verify pass");
            check_bookkeeping(&cut);
        }
    }
    let prompt = long_prompt(3);
    let whole = decoder.speculate(&greedy(&prompt, 30, &[])).unwrap();
    let stopped = decoder.speculate(&greedy(&prompt, 30, &whole.tokens()[..1])).unwrap();
    assert!(
        stopped.stopped && stopped.tokens() == whole.tokens()[..1] && stopped.passes() == 0,
        "the prefill's token may be a stop token"
    );
}

#[test]
#[should_panic(expected = "prompts of this length")]
fn a_prompt_longer_than_the_bound_is_refused() {
    let _ = Models::open().decoder(70).speculate(&greedy(&long_prompt(71), 1, &[]));
}

/// Tokens seen in one situation and what the target's distributions say of them.
struct Tally {
    name: &'static str,
    seen: Vec<f64>,
    expected: Vec<f64>,
}

impl Tally {
    fn new(name: &'static str, vocab: usize) -> Tally {
        Tally { name, seen: vec![0.0; vocab], expected: vec![0.0; vocab] }
    }

    fn add(&mut self, token: u32, p: &[f64]) {
        self.seen[token as usize] += 1.0;
        self.expected.iter_mut().zip(p).for_each(|(e, p)| *e += p);
    }

    /// Pearson's χ² over tokens expected at least 5 times, the rest pooled into one cell, as a standard normal (Wilson and Hilferty 1931).
    /// Contexts differ between draws, so a cell's variance is Σ p(1-p) ≤ Σ p: the χ² law bounds it from above. None where the tokens do not
    /// fill five cells.
    fn excess(&self) -> Option<f64> {
        let (mut chi, mut cells, mut rest) = (0.0, 0, (0.0, 0.0));
        for (&o, &e) in self.seen.iter().zip(&self.expected) {
            if e >= 5.0 {
                chi += (o - e) * (o - e) / e;
                cells += 1;
            } else {
                rest = (rest.0 + o, rest.1 + e);
            }
        }
        if rest.1 >= 5.0 {
            chi += (rest.0 - rest.1) * (rest.0 - rest.1) / rest.1;
            cells += 1;
        }
        let degrees = f64::from(cells - 1);
        let spread = 2.0 / (9.0 * degrees);
        (cells >= 5).then(|| ((chi / degrees).cbrt() - (1.0 - spread)) / spread.sqrt())
    }
}

/// Changes what the decoder reads as the probability of a draft: a decoder with a wrong acceptance rule.
struct Tampered {
    inner: CpuExecutor,
    prob: TensorId,
    rule: fn(f32) -> f32,
}

impl Executor for Tampered {
    type Slot = Vec<f32>;

    fn write(&mut self, t: TensorId, data: HostRef<'_>) -> Result<(), ExecError> {
        self.inner.write(t, data)
    }

    fn read(&mut self, t: TensorId, out: HostMut<'_>) -> Result<(), ExecError> {
        match out {
            HostMut::F32(values) if t == self.prob => {
                self.inner.read(t, HostMut::F32(values))?;
                values.iter_mut().for_each(|p| *p = (self.rule)(*p));
                Ok(())
            }
            out => self.inner.read(t, out),
        }
    }

    fn fetch(&mut self, tensors: &[TensorId]) -> Result<Fetch, ExecError> {
        self.inner.fetch(tensors)
    }

    fn collect(&mut self, fetch: Fetch, each: &mut dyn FnMut(usize, HostRef<'_>)) -> Result<(), ExecError> {
        self.inner.collect(fetch, each)
    }

    fn run(&mut self, phase: PhaseId, slot: SlotArg<'_, Vec<f32>>) -> Result<(), ExecError> {
        self.inner.run(phase, slot)
    }

    fn prepare(&mut self) -> Result<(), ExecError> {
        self.inner.prepare()
    }

    fn new_slot(&self) -> Result<Vec<f32>, ExecError> {
        self.inner.new_slot()
    }

    fn with_grads(&mut self, f: &mut dyn FnMut(&mut [f32])) -> Result<(), ExecError> {
        self.inner.with_grads(f)
    }

    fn held_bytes(&self) -> u64 {
        self.inner.held_bytes()
    }
}

/// Samples `count` completions of three tokens and compares each token with the target's distribution given what came before it. The third token
/// is tallied by the origin of the second: a row further on in the same pass, or a pass of its own.
fn sampled<E: Executor + Send>(
    models: &Models,
    decoder: &mut Decoder<E>,
    prompt: &[u32],
    temperature: f32,
    count: u64,
    drafts: bool,
) -> Vec<Tally> {
    let mut complete = |i| {
        let request = Request { prompt, max_new_tokens: 3, temperature, stop: &[], seed: i / 2, number: i % 2 };
        if drafts { decoder.speculate(&request) } else { decoder.plain(&request) }.unwrap()
    };
    // In the compute thread itself: thousands of tiny passes would spend most of their time handing over to it.
    let completions: Vec<Completion> = models.backend.pool().install(|| (0..count).map(&mut complete).collect());
    let sequences: Vec<Vec<u32>> = completions.iter().map(|c| [prompt, &c.tokens()[..2]].concat()).collect();
    let next = models.next_token(&sequences, f64::from(temperature));
    let vocab = models.target.config.vocab;
    let names = [
        "the prefill's token",
        "the first verified token",
        "the second after the target's own token",
        "the second after a draft",
    ];
    let mut tallies: Vec<Tally> = names.into_iter().map(|n| Tally::new(n, vocab)).collect();
    for (c, next) in completions.iter().zip(&next) {
        let (tokens, last) = (c.tokens(), prompt.len() - 1);
        tallies[0].add(tokens[0], &next[last]);
        tallies[1].add(tokens[1], &next[last + 1]);
        let after_draft = usize::from(c.emitted[1].origin == Origin::Draft(1));
        tallies[2 + after_draft].add(tokens[2], &next[last + 2]);
    }
    tallies
}

/// What a wrong distribution exceeds; a right one does with probability below 1e-5.
const BOUND: f64 = 4.3;

/// A temperature at which the tiny target is sure enough of its tokens for a third of the first drafts to be accepted.
const COLD: f32 = 0.15;

#[test]
fn sampled_tokens_are_distributed_as_the_targets() {
    let (golden, models) = (golden(), Models::open());
    let mut decoder = models.decoder(16);
    let mut check = |request: usize, temperature: f32, count: u64, drafts: bool| -> usize {
        let tallies = sampled(&models, &mut decoder, &golden.requests[request].prompt, temperature, count, drafts);
        let tested = tallies.iter().filter_map(|t| Some((t.excess()?, t.name)));
        tested.map(|(z, name)| assert!(z < BOUND, "request {request}, temperature {temperature}, {name}: {z:.2}")).count()
    };
    // At temperature 1 this target gives a draft a few percent: too few completions have an accepted one for the fourth tally.
    assert!(check(0, 1.0, 2500, true) >= 3);
    assert_eq!(check(3, COLD, 2000, true), 4);
    assert_eq!(check(0, 1.0, 500, false), 3);
}

#[test]
fn a_wrong_acceptance_rule_is_caught() {
    let (golden, models) = (golden(), Models::open());
    type Rule = (&'static str, f32, fn(f32) -> f32);
    let rules: [Rule; 4] =
        [("always", 1.0, |_| 1.0), ("always", COLD, |_| 1.0), ("never", COLD, |_| 0.0), ("half as often", COLD, |p| p / 2.0)];
    for (name, temperature, rule) in rules {
        let mut decoder = models.decoder_on(16, |inner, program| {
            let prob = program.find("target.verify.prob").expect("the verify pass has probabilities");
            Tampered { inner, prob, rule }
        });
        let first = &sampled(&models, &mut decoder, &golden.requests[3].prompt, temperature, 500, true)[1];
        let z = first.excess().expect("enough tokens");
        println!("accepting {name} at temperature {temperature}: {z:.1}");
        assert!(z > 1.5 * BOUND, "accepting {name} at temperature {temperature} goes unnoticed: {z:.2}");
    }
}
