//! Single flight: concurrent deliveries of one event with the same body, in one process, are recorded once.
//!
//! The first leads, the others wait for its result. A delivery with another body never joins: it is another claim
//! about what the event is, and Postgres decides.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::identify::{Digest, EventKey};

type Waiters<T> = HashMap<(EventKey, Digest), Vec<oneshot::Sender<T>>>;

/// The flights of a process.
#[derive(Debug)]
pub struct Flights<T> {
    waiters: Mutex<Waiters<T>>,
}

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self { waiters: Mutex::default() }
    }
}

/// What a delivery is in its flight.
#[derive(Debug)]
pub enum Seat<T: Clone> {
    /// The first: it has to land the flight.
    Leader(Leader<T>),
    /// Gets the leader's result; an error if the leader was lost.
    Follower(oneshot::Receiver<T>),
    /// Too many wait already.
    Full,
}

/// The obligation to [`land`](Leader::land). Dropped without, the followers learn that there is no result.
#[derive(Debug)]
pub struct Leader<T: Clone> {
    flights: Arc<Flights<T>>,
    /// Taken when it lands: a flight that has started meanwhile is not ours.
    flight: Option<(EventKey, Digest)>,
}

impl<T: Clone> Flights<T> {
    /// Joins the flight of this event and body, if it has fewer than `waiters_max` followers; or starts one.
    pub fn join(self: &Arc<Self>, key: EventKey, digest: Digest, waiters_max: usize) -> Seat<T> {
        let flight = (key, digest);
        match self.lock().entry(flight) {
            Entry::Vacant(entry) => {
                entry.insert(Vec::new());
                Seat::Leader(Leader { flights: Arc::clone(self), flight: Some(flight) })
            }
            Entry::Occupied(entry) if entry.get().len() >= waiters_max => Seat::Full,
            Entry::Occupied(mut entry) => {
                let (sender, receiver) = oneshot::channel();
                entry.get_mut().push(sender);
                Seat::Follower(receiver)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters<T>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Leader<T> {
    /// Gives the result to all who joined; later deliveries start anew.
    pub fn land(mut self, result: &T) {
        for follower in self.take_followers() {
            // A follower that is gone needs no answer.
            drop(follower.send(result.clone()));
        }
    }

    fn take_followers(&mut self) -> Vec<oneshot::Sender<T>> {
        let flight = self.flight.take();
        flight.and_then(|flight| self.flights.lock().remove(&flight)).unwrap_or_default()
    }
}

impl<T: Clone> Drop for Leader<T> {
    fn drop(&mut self) {
        drop(self.take_followers());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: EventKey = EventKey([1; 16]);
    const BODY: Digest = Digest([2; 32]);

    #[test]
    fn followers_get_the_leaders_result() {
        let flights = Arc::<Flights<u8>>::default();
        let Seat::Leader(leader) = flights.join(KEY, BODY, 2) else { panic!("the first leads") };
        let Seat::Follower(mut one) = flights.join(KEY, BODY, 2) else { panic!("the second follows") };
        let Seat::Follower(mut two) = flights.join(KEY, BODY, 2) else { panic!("the third follows") };
        assert!(matches!(flights.join(KEY, BODY, 2), Seat::Full));
        assert!(matches!(flights.join(KEY, Digest([3; 32]), 2), Seat::Leader(_)), "another body never joins");
        leader.land(&7);
        assert_eq!((one.try_recv(), two.try_recv()), (Ok(7), Ok(7)));
        assert!(matches!(flights.join(KEY, BODY, 2), Seat::Leader(_)), "a landed flight is over");
    }

    #[test]
    fn a_lost_leader_frees_its_followers() {
        let flights = Arc::<Flights<u8>>::default();
        let leader = flights.join(KEY, BODY, 2);
        let Seat::Follower(mut follower) = flights.join(KEY, BODY, 2) else { panic!("the second follows") };
        drop(leader);
        assert!(follower.try_recv().is_err());
        assert!(matches!(flights.join(KEY, BODY, 2), Seat::Leader(_)));
    }
}
