//! Its job: the drafters of one process decide together and add up their gradients.
//! It refuses to reduce lists of different shapes, and to let a rank leave while another waits for it.
//! Invariants: element i of a sum is ((x0 + x1) + x2) + … in rank order, so it is the same bit for bit on every rank, in every run and for every
//! order of arrival. Nobody passes a meeting before all ranks have come; a meeting ends early only by cancellation.

use super::board::{Station, What};
use super::cancel::{Cancel, Cancelled, Kind, Wake};
use super::sync::{Arc, Condvar, Mutex, RwLock, lock, wait};
use std::ops::Range;

struct Round<T> {
    number: u64,
    values: Vec<Option<T>>,
    /// What the last full round brought together; a rank that is slow to wake reads it here, for the next round cannot end without it.
    last: Arc<[T]>,
    joined: Vec<Option<Station>>,
    left: Vec<bool>,
}

struct Table<T> {
    round: Mutex<Round<T>>,
    met: Condvar,
    cancel: Cancel,
}

impl<T: Clone + Send + Sync> Wake for Table<T> {
    fn wake(&self) {
        let _round = lock(&self.round);
        self.met.notify_all();
    }
}

/// What can be wrong with a group's use.
#[derive(Debug, thiserror::Error)]
pub enum ReduceError {
    /// The rank was taken already or does not exist.
    #[error("rank {rank} of {ranks} is not there or already taken; each drafter joins its own rank once")]
    NoSuchRank {
        /// Asked for.
        rank: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// Two ranks brought lists of different lengths.
    #[error(
        "rank {rank} brought tensors of {found:?} elements where rank 0 brought {expected:?}; all drafters must run one plan"
    )]
    Shapes {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Lengths at rank 0.
        expected: Vec<usize>,
        /// Lengths at that rank.
        found: Vec<usize>,
    },
    /// The run was cancelled while the rank waited.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

/// A meeting point of a fixed number of ranks. Clones are the same meeting.
#[derive(Clone)]
pub struct Meeting<T>(Arc<Table<T>>);

impl<T: Clone + Send + Sync + 'static> Meeting<T> {
    /// A meeting of `ranks` members.
    pub fn new(ranks: usize, cancel: &Cancel) -> Self {
        let round = Round {
            number: 0,
            values: (0..ranks).map(|_| None).collect(),
            last: Arc::new([]),
            joined: vec![None; ranks],
            left: vec![false; ranks],
        };
        let table = Arc::new(Table { round: Mutex::new(round), met: Condvar::new(), cancel: cancel.clone() });
        let waker = Arc::downgrade(&table);
        cancel.register(waker);
        Self(table)
    }

    /// Takes the place of `rank`.
    ///
    /// # Errors
    /// [`ReduceError::NoSuchRank`].
    pub fn join(&self, rank: usize, station: &Station) -> Result<Member<T>, ReduceError> {
        let mut round = lock(&self.0.round);
        let ranks = round.joined.len();
        match round.joined.get_mut(rank) {
            Some(joined @ None) => *joined = Some(station.clone()),
            _ => return Err(ReduceError::NoSuchRank { rank, ranks }),
        }
        Ok(Member { table: self.0.clone(), rank, ranks, station: station.clone() })
    }
}

/// One rank's place in a meeting. A rank that is dropped has left: whoever waits for it, now or later, cancels the run.
pub struct Member<T: Clone + Send + Sync + 'static> {
    table: Arc<Table<T>>,
    rank: usize,
    ranks: usize,
    station: Station,
}

impl<T: Clone + Send + Sync + 'static> Member<T> {
    /// This member's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks meet.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Brings a value, waits for all ranks, and returns everybody's values in rank order; the same list on every rank. Deciding together is a
    /// fold over it: stop if it `contains(&true)`, save if rank 0 says so.
    ///
    /// # Errors
    /// [`Cancelled`], also when a rank has left that this one would wait for.
    pub fn gather(&mut self, value: T) -> Result<Arc<[T]>, Cancelled> {
        let table = &*self.table;
        let mut round = lock(&table.round);
        table.cancel.check()?;
        let number = round.number;
        round.values[self.rank] = Some(value);
        if round.values.iter().all(Option::is_some) {
            round.last = round.values.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            table.met.notify_all();
            return Ok(round.last.clone());
        }
        let mut span = None;
        loop {
            let missing = round.values.iter().position(Option::is_none).unwrap_or(self.rank);
            let gone = (0..self.ranks).find(|&rank| round.left[rank] && round.values[rank].is_none());
            if let Some(gone) = gone {
                let culprit = round.joined[gone].clone().unwrap_or_else(|| self.station.clone());
                drop(round);
                let error = format!("rank {gone} has left the group while rank {} waits for it", self.rank);
                table.cancel.cancel(culprit.cause(Kind::Failed, error).provisional());
                round = lock(&table.round);
            }
            table.cancel.check()?;
            let what = What::new("the other drafters, first of all rank").number(missing);
            match &span {
                None => span = Some(self.station.waiting(what)),
                Some(span) => span.now_for(what),
            }
            round = wait(&table.met, round);
            if round.number != number {
                return Ok(round.last.clone());
            }
        }
    }

    /// Waits for all ranks and returns the value that `from` brought.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn broadcast(&mut self, from: usize, value: T) -> Result<T, Cancelled> {
        Ok(self.gather(value)?[from].clone())
    }
}

impl<T: Clone + Send + Sync + 'static> Drop for Member<T> {
    fn drop(&mut self) {
        lock(&self.table.round).left[self.rank] = true;
        self.table.met.notify_all();
    }
}

struct Staging {
    /// What each rank brought of the present chunk.
    brought: Vec<RwLock<Vec<f32>>>,
    /// The share of the sum that each rank has formed.
    summed: Vec<RwLock<Vec<f32>>>,
    chunk: usize,
}

/// Sums lists of tensors over the ranks of one process. Clones are the same group.
#[derive(Clone)]
pub struct AllReduce {
    staging: Arc<Staging>,
    shapes: Meeting<Vec<usize>>,
    fence: Meeting<()>,
}

/// Elements summed between two fences when the caller has no reason for another figure: 4 MiB per rank, which the outer caches hold.
pub const CHUNK: usize = 1 << 20;

impl AllReduce {
    /// A group of `ranks` that works in chunks of `chunk` elements. Staging memory is `8 · chunk` bytes for each rank, or less.
    pub fn new(ranks: usize, chunk: usize, cancel: &Cancel) -> Self {
        let buffers = || (0..ranks).map(|_| RwLock::new(Vec::new())).collect();
        Self {
            staging: Arc::new(Staging { brought: buffers(), summed: buffers(), chunk: chunk.max(1) }),
            shapes: Meeting::new(ranks, cancel),
            fence: Meeting::new(ranks, cancel),
        }
    }

    /// Takes the place of `rank`.
    ///
    /// # Errors
    /// [`ReduceError::NoSuchRank`].
    pub fn join(&self, rank: usize, station: &Station) -> Result<Reducer, ReduceError> {
        let shapes = self.shapes.join(rank, station)?;
        let fence = self.fence.join(rank, station)?;
        Ok(Reducer { staging: self.staging.clone(), shapes, fence })
    }
}

/// One rank's place in an all-reduce.
pub struct Reducer {
    staging: Arc<Staging>,
    shapes: Member<Vec<usize>>,
    fence: Member<()>,
}

impl Reducer {
    /// Members of the group.
    pub fn ranks(&self) -> usize {
        self.fence.ranks
    }

    /// This member's rank.
    pub fn rank(&self) -> usize {
        self.fence.rank
    }

    /// Replaces every element by its sum over the ranks. All ranks call it with lists of the same lengths. Each rank sums its share of a
    /// chunk, so the work of a sum is divided by their number.
    ///
    /// # Errors
    /// [`ReduceError::Shapes`] on every rank, with nothing summed, when the lists differ; [`ReduceError::Cancelled`], after which the lists may
    /// hold partial results.
    pub fn sum(&mut self, tensors: &mut [&mut [f32]]) -> Result<(), ReduceError> {
        let lengths = self.shapes.gather(tensors.iter().map(|tensor| tensor.len()).collect())?;
        if let Some(rank) = lengths.iter().position(|other| *other != lengths[0]) {
            return Err(ReduceError::Shapes { rank, expected: lengths[0].clone(), found: lengths[rank].clone() });
        }
        let (rank, ranks) = (self.fence.rank, self.fence.ranks);
        let total: usize = lengths[0].iter().sum();
        if ranks == 1 {
            return Ok(());
        }
        let staging = self.staging.clone();
        let mut start = 0;
        while start < total {
            let len = staging.chunk.min(total - start);
            {
                let mut brought = write(&staging.brought[rank]);
                brought.clear();
                walk(tensors, start..start + len, |part| brought.extend_from_slice(part));
            }
            self.fence.gather(())?;
            add_share(&staging, rank, ranks, len);
            self.fence.gather(())?;
            let mut shares = (0..ranks).map(|owner| read(&staging.summed[owner])).collect::<Vec<_>>().into_iter();
            let mut share = shares.next();
            let mut at = 0;
            walk(tensors, start..start + len, |part| {
                let mut done = 0;
                while done < part.len() {
                    let Some(values) = &share else { return };
                    let take = (part.len() - done).min(values.len() - at);
                    part[done..done + take].copy_from_slice(&values[at..at + take]);
                    done += take;
                    at += take;
                    if at == values.len() {
                        share = shares.next();
                        at = 0;
                    }
                }
            });
            start += len;
        }
        Ok(())
    }
}

/// Sums this rank's share of the chunk, over the ranks in their order.
fn add_share(staging: &Staging, rank: usize, ranks: usize, len: usize) {
    let mine = len * rank / ranks..len * (rank + 1) / ranks;
    let mut summed = write(&staging.summed[rank]);
    summed.clear();
    summed.extend_from_slice(&read(&staging.brought[0])[mine.clone()]);
    for other in &staging.brought[1..] {
        for (sum, x) in summed.iter_mut().zip(&read(other)[mine.clone()]) {
            *sum += x;
        }
    }
}

/// Hands out the parts of `tensors` that `range` of their concatenation covers, in order.
fn walk(tensors: &mut [&mut [f32]], range: Range<usize>, mut visit: impl FnMut(&mut [f32])) {
    let mut base = 0;
    for tensor in tensors {
        let len = tensor.len();
        let from = range.start.clamp(base, base + len) - base;
        let to = range.end.clamp(base, base + len) - base;
        if from < to {
            visit(&mut tensor[from..to]);
        }
        base += len;
    }
}

fn read<T>(lock: &RwLock<T>) -> impl std::ops::Deref<Target = T> + '_ {
    lock.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn write<T>(lock: &RwLock<T>) -> impl std::ops::DerefMut<Target = T> + '_ {
    lock.write().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(all(test, not(shuttle)))]
#[path = "reduce_tests.rs"]
mod tests;
