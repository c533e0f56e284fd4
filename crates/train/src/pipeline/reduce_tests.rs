//! Tests of meetings and of the all-reduce against a plain loop.

use super::super::board::Board;
use super::*;
use proptest::prelude::*;

/// Runs one closure per rank on its own thread and returns the results in rank order.
fn on_ranks<T: Send>(ranks: usize, body: impl Fn(usize, &Station) -> T + Sync) -> Vec<T> {
    let board = Board::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (board, body) = (&board, &body);
                scope.spawn(move || body(rank, &board.register(format!("drafter {rank}"), None)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_rank_gets_the_sum_in_rank_order_bit_for_bit(
        ranks in 1usize..6, chunk in 1usize..40, lengths in prop::collection::vec(0usize..50, 0..4), seed in any::<u32>(), rounds in 1u32..3,
    ) {
        // Values of very different size, so that another order of addition gives other bits.
        let value = |round: u32, rank: usize, tensor: usize, i: usize| {
            let mut x = seed ^ (round * 97 + rank as u32 * 31 + tensor as u32 * 7 + i as u32).wrapping_mul(0x9E37_79B9);
            x ^= x >> 15;
            x = x.wrapping_mul(0x85EB_CA6B);
            (x as f32 / u32::MAX as f32 - 0.5) * 10f32.powi((x % 13) as i32 - 6)
        };
        let cancel = Cancel::new();
        let group = AllReduce::new(ranks, chunk, &cancel);
        let results = on_ranks(ranks, |rank, station| {
            let mut reducer = group.join(rank, station).unwrap();
            (0..rounds).map(|round| {
                let mut tensors: Vec<Vec<f32>> = lengths.iter().enumerate()
                    .map(|(t, len)| (0..*len).map(|i| value(round, rank, t, i)).collect()).collect();
                let mut views: Vec<&mut [f32]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
                reducer.sum(&mut views).unwrap();
                tensors
            }).collect::<Vec<_>>()
        });
        for result in &results {
            for (round, tensors) in result.iter().enumerate() {
                for (t, tensor) in tensors.iter().enumerate() {
                    prop_assert_eq!(tensor.len(), lengths[t]);
                    for (i, sum) in tensor.iter().enumerate() {
                        let expected = (1..ranks).fold(value(round as u32, 0, t, i), |acc, r| acc + value(round as u32, r, t, i));
                        prop_assert_eq!(sum.to_bits(), expected.to_bits());
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_decide_together() {
    let meeting = Meeting::new(3, &Cancel::new());
    let results = on_ranks(3, |rank, station| {
        let mut member = meeting.join(rank, station).unwrap();
        let stops: Vec<bool> = (0..5).map(|step| member.gather(rank == 1 && step == 3).unwrap().contains(&true)).collect();
        (stops, member.broadcast(2, rank == 2).unwrap())
    });
    for result in results {
        assert_eq!(result, (vec![false, false, false, true, false], true));
    }
}

#[test]
fn different_shapes_are_an_error_on_every_rank() {
    let group = AllReduce::new(2, CHUNK, &Cancel::new());
    let results = on_ranks(2, |rank, station| {
        let mut data = vec![1.0f32; 3 + rank];
        group.join(rank, station).unwrap().sum(&mut [&mut data]).unwrap_err().to_string()
    });
    for text in results {
        assert!(text.starts_with("rank 1 brought tensors of [4] elements where rank 0 brought [3]"), "{text}");
    }
}

#[test]
fn a_rank_that_left_is_named_by_whoever_waits_for_it() {
    let cancel = Cancel::new();
    let meeting = Meeting::new(2, &cancel);
    let results = on_ranks(2, |rank, station| {
        let mut member = meeting.join(rank, station).unwrap();
        member.gather(rank).unwrap();
        // One rank makes a step less than the other: an epoch's tail counted wrongly.
        if rank == 0 { None } else { Some(member.gather(rank).unwrap_err()) }
    });
    assert!(results[1].is_some());
    let cause = cancel.cause().unwrap();
    assert_eq!(cause.to_string(), "drafter 0 failed: rank 0 has left the group while rank 1 waits for it");
}

#[test]
fn a_rank_joins_once() {
    let meeting = Meeting::<()>::new(1, &Cancel::new());
    let station = Board::default().register("drafter 0", None);
    let _member = meeting.join(0, &station).unwrap();
    assert!(matches!(meeting.join(0, &station), Err(ReduceError::NoSuchRank { rank: 0, ranks: 1 })));
    assert!(matches!(meeting.join(1, &station), Err(ReduceError::NoSuchRank { rank: 1, ranks: 1 })));
}
