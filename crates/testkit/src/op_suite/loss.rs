//! Cases of `HeadLoss` and `PickTokens`.
//!
//! An argmax or a draw has no one right answer where two candidates are closer than the arithmetic's error, so inputs are drawn again until
//! every decision has a margin; exact ties, whose answer the contracts fix, are planted on purpose.

use super::Case;
use super::build::Build;
use crate::inputs::GARBAGE;
use crate::oracle::{draw_margin, round_to};
use drafthorse_graph::op::head_loss::{Labels, RowMetrics};
use drafthorse_graph::op::pick_tokens::Picks;
use drafthorse_graph::op::{HeadLoss, PickTokens};
use drafthorse_graph::{DType, Role};

#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    count: usize,
    hidden: usize,
    vocab: usize,
    chunk: usize,
    gradient: bool,
}

pub(super) fn cases(act: DType) -> Vec<Case> {
    let usual = Shape { rows: 23, count: 19, hidden: 16, vocab: 101, chunk: 5, gradient: true };
    let mut cases = Vec::new();
    for (name, shape) in [
        ("ragged", usual),
        ("all_rows", Shape { count: 23, chunk: 23, ..usual }),
        ("no_row", Shape { count: 0, ..usual }),
        ("one_row", Shape { rows: 1, count: 1, chunk: 1, ..usual }),
        ("count_at_a_chunk", Shape { count: 10, ..usual }),
        ("forward_only", Shape { gradient: false, ..usual }),
        ("real_vocabulary", Shape { rows: 4, count: 3, hidden: 8, vocab: 151_936, chunk: 2, ..usual }),
    ] {
        cases.push(head_loss(&format!("head_loss_{name}"), act, shape));
    }
    for (name, temperature) in [("greedy", 0.0), ("cold", 0.3), ("plain", 1.0), ("hot", 2.5)] {
        cases.push(pick(&format!("pick_tokens_{name}"), act, temperature, 8, 67, 2.0));
    }
    cases.push(pick("pick_tokens_two", act, 1.0, 8, 2, 1.0));
    cases.push(pick("pick_tokens_real_vocabulary", act, 1.0, 8, 151_936, 6.0));
    cases
}

/// Logits of one row as the head gives them.
fn logits(x: &[f64], head: &[f64]) -> Vec<f64> {
    head.chunks(x.len()).map(|h| x.iter().zip(h).map(|(a, b)| a * b).sum()).collect()
}

/// Index of the largest and its lead over the second, in units of the largest magnitude.
fn lead(z: &[f64]) -> (usize, f64) {
    let best = (0..z.len()).max_by(|&a, &b| z[a].total_cmp(&z[b])).expect("a logit");
    let second = z.iter().enumerate().filter(|&(i, _)| i != best).map(|(_, &z)| z).fold(f64::NEG_INFINITY, f64::max);
    (best, (z[best] - second) / z[best].abs())
}

fn head_loss(name: &str, act: DType, s: Shape) -> Case {
    let mut b = Build::new(name, act);
    let (rows, hidden, vocab) = (s.rows, s.hidden, s.vocab);
    let head_data: Vec<f64> = b.rng.normals(vocab * hidden, 1.0).into_iter().map(|x| round_to(act, x)).collect();
    let (mut x, mut labels, mut weights) = (Vec::new(), Vec::new(), b.rng.uniforms(rows, 0.05, 1.0));
    for r in 0..rows {
        // Rows 0..4 of a long case saturate; rows 5 and 6 are zero, where every logit ties and the lowest index wins.
        let std = if r < 4 && rows > 4 { 40.0 } else { 1.0 };
        let (row, best) = loop {
            let row: Vec<f64> = b.rng.normals(hidden, std).into_iter().map(|x| round_to(act, x)).collect();
            let (best, lead) = lead(&logits(&row, &head_data));
            if lead > 0.02 {
                break (row, best);
            }
        };
        x.extend(if matches!(r, 5 | 6) { vec![0.0; hidden] } else { row });
        labels.push(match r {
            5 => 0,
            6 => 3,
            _ if r % 3 == 0 => best as i32,
            _ => ((best + 1 + b.rng.below(vocab - 1)) % vocab) as i32,
        });
        if r >= s.count {
            labels[r] = GARBAGE;
            weights[r] = 7.0;
        } else if matches!(r, 4 | 9) {
            weights[r] = 0.0;
        }
    }
    let x = b.given("x", &[rows, hidden], act, Role::Input, x);
    let head = b.given("head", &[vocab, hidden], act, Role::Frozen, head_data);
    let labels = Labels {
        labels: b.ints("labels", labels),
        weights: b.given("weights", &[rows], DType::F32, Role::Input, weights),
        count: b.ints("count", vec![s.count as i32]),
    };
    let logits = b.scratch("logits", &[s.chunk, vocab], act);
    let sums = b.given("sums", &[2], DType::F32, Role::Grad, vec![3.5, 1.25]);
    let metrics = RowMetrics {
        ce: b.output_of("ce", &[rows], DType::F32),
        prob: b.output_of("prob", &[rows], DType::F32),
        hit: b.output_of("hit", &[rows], DType::I32),
    };
    let dx = s.gradient.then(|| b.output("dx", &[rows, hidden]));
    b.op(HeadLoss { x, head, labels, chunk: s.chunk, logits, sums, metrics, dx })
}

/// Rows: no probe, the argmax as probe, any probe, a tie of the two largest, uniforms at the ends of [0, 1), a probe whose probability is 1 less
/// a few roundings, and one beside which no token has a representable mass.
fn pick(name: &str, act: DType, temperature: f64, rows: usize, vocab: usize, std: f64) -> Case {
    let mut b = Build::new(name, act);
    let mut z: Vec<f64> = b.rng.normals(rows * vocab, std).into_iter().map(|x| round_to(DType::F32, x)).collect();
    let (mut probe, mut uniform) = (vec![-1; rows], vec![0.0; rows]);
    for (r, z) in z.chunks_mut(vocab).enumerate() {
        let (best, _) = lead(z);
        match r {
            1 | 6 | 7 => probe[r] = best as i32,
            2 => probe[r] = b.rng.below(vocab) as i32,
            3 => z[(best + 1) % vocab] = z[best],
            _ => {}
        }
        match r {
            6 => z[best] = round_to(DType::F32, z[best] + 16.0 * temperature),
            7 => z[best] = round_to(DType::F32, z[best] + 200.0 * temperature),
            _ => {}
        }
        uniform[r] = match r {
            4 => 0.0,
            5 => f64::from(1.0 - f32::EPSILON / 2.0),
            _ => loop {
                let u = round_to(DType::F32, b.rng.uniform());
                if draw_margin(z, temperature, u, probe[r]) > 1e-4 {
                    break u;
                }
            },
        };
        // At the ends of [0, 1) the share of the outermost tokens must exceed the arithmetic's error.
        if matches!(r, 4 | 5) {
            let ends = [0, vocab - 1];
            ends.iter().for_each(|&e| z[e] = z[best]);
        }
    }
    let logits = b.given("logits", &[rows, vocab], DType::F32, Role::Input, z);
    let temperature = b.given("temperature", &[1], DType::F32, Role::Input, vec![temperature]);
    let uniform = b.given("uniform", &[rows], DType::F32, Role::Input, uniform);
    let probe = b.ints("probe", probe);
    let picks = Picks {
        argmax: b.output_of("argmax", &[rows], DType::I32),
        top2: b.output_of("top2", &[rows, 2], DType::F32),
        prob: b.output_of("prob", &[rows], DType::F32),
        drawn: b.output_of("drawn", &[rows], DType::I32),
    };
    b.op(PickTokens { logits, temperature, uniform, probe, picks })
}
