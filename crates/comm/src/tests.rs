//! The conformance suite: every collective, on one to four ranks, in every kind and at odd sizes, equals its definition;
//! what does not fit fails on every rank.

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use crate::testing::{launches, ranks};
use crate::{Reduction, World};

const LONG: Duration = Duration::from_mins(1);
const KINDS: [Kind; 5] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double, Kind::Int64];
const SIZES: [i64; 4] = [0, 1, 7, 129];

/// Small whole numbers, exact in every kind, another for each rank and place.
fn values(rank: usize, count: i64, kind: Kind) -> Tensor {
    (Tensor::arange(count, (Kind::Int64, Device::Cpu)).remainder(5) + (rank as i64 + 1)).to_kind(kind)
}

fn zeros(count: i64, kind: Kind) -> Tensor {
    Tensor::zeros([count], (kind, Device::Cpu))
}

fn everywhere(check: impl Fn(&World, i64, Kind) + Sync) {
    for count in 1..=4 {
        ranks(count, LONG, |world| {
            for kind in KINDS {
                for size in SIZES {
                    check(world, size, kind);
                }
            }
        });
    }
}

#[track_caller]
fn assert_equal(found: &Tensor, expected: &Tensor) {
    assert!(found.equal(expected), "found {found:?}, expected {expected:?}: {found} {expected}");
}

#[test]
fn all_reduce_is_the_reduction_of_all() {
    everywhere(|world, size, kind| {
        let group = world.everyone().unwrap();
        let all: Vec<Tensor> = (0..group.size()).map(|rank| values(rank, size, kind)).collect();
        for (reduction, expected) in [
            (Reduction::Sum, all.iter().fold(zeros(size, kind), |sum, next| sum + next)),
            (Reduction::Max, all.iter().fold(all[0].copy(), |most, next| most.maximum(next))),
            (Reduction::Min, all.iter().fold(all[0].copy(), |least, next| least.minimum(next))),
        ] {
            let tensor = values(world.rank(), size, kind);
            group.all_reduce(&tensor, reduction).unwrap().wait().unwrap();
            assert_equal(&tensor, &expected);
        }
    });
}

#[test]
fn all_gather_and_reduce_scatter_are_each_others_counterpart() {
    everywhere(|world, size, kind| {
        let group = world.everyone().unwrap();
        let members = group.size() as i64;
        let gathered = zeros(members * size, kind);
        group.all_gather(&gathered, &values(world.rank(), size, kind)).unwrap().wait().unwrap();
        let all: Vec<Tensor> = (0..group.size()).map(|rank| values(rank, size, kind)).collect();
        assert_equal(&gathered, &Tensor::cat(&all, 0));

        let part = zeros(size, kind);
        group.reduce_scatter(&part, &values(world.rank(), members * size, kind)).unwrap().wait().unwrap();
        let sum = (0..group.size()).map(|rank| values(rank, members * size, kind)).reduce(|a, b| a + b).unwrap();
        assert_equal(&part, &sum.narrow(0, world.rank() as i64 * size, size));
    });
}

#[test]
fn stretches_are_gathered_and_added_up_in_place() {
    everywhere(|world, size, kind| {
        let group = world.everyone().unwrap();
        let (own, members) = (world.rank(), group.size());
        let all: Vec<Tensor> = (0..members).map(|rank| values(rank, size, kind)).collect();
        let stretches = zeros(members as i64 * size, kind);
        stretches.narrow(0, own as i64 * size, size).copy_(&all[own]);
        group.all_gather_in_place(&stretches).unwrap().wait().unwrap();
        assert_equal(&stretches, &Tensor::cat(&all, 0));

        let mine = values(own, members as i64 * size, kind);
        let kept = mine.shallow_clone();
        let sum = group.reduce_scatter_in_place(&mine).unwrap().wait().unwrap();
        let sums = (0..members).map(|rank| values(rank, members as i64 * size, kind)).reduce(|a, b| a + b).unwrap();
        assert_equal(&sum, &sums.narrow(0, own as i64 * size, size).to_kind(Kind::Float));
        assert!(size == 0 || sum.data_ptr() != kept.narrow(0, own as i64 * size, size).data_ptr(), "memory of its own");
    });
}

#[test]
fn broadcast_gives_everyone_the_roots() {
    everywhere(|world, size, kind| {
        let group = world.everyone().unwrap();
        for root in 0..group.size() {
            let tensor = values(world.rank(), size, kind);
            group.broadcast(&tensor, root).unwrap().wait().unwrap();
            assert_equal(&tensor, &values(root, size, kind));
        }
    });
}

#[test]
fn all_to_all_sends_each_row_where_it_belongs() {
    everywhere(|world, width, kind| {
        let group = world.everyone().unwrap();
        let (own, members) = (world.rank() as i64, group.size() as i64);
        // Rank r sends r + i + 1 rows to member i; a row says where it comes from and goes to.
        let row = |from: i64, to: i64| Tensor::full([1, width], from * 4 + to, (kind, Device::Cpu));
        let sent: Vec<i64> = (0..members).map(|to| own + to + 1).collect();
        let block = |from, to| row(from, to).repeat([from + to + 1, 1]);
        let input = Tensor::cat(&(0..members).map(|to| block(own, to)).collect::<Vec<_>>(), 0);
        let expected = Tensor::cat(&(0..members).map(|from| block(from, own)).collect::<Vec<_>>(), 0);
        let output = expected.zeros_like();
        group.all_to_all(&output, &input, &sent, &sent).unwrap().wait().unwrap();
        assert_equal(&output, &expected);
    });
}

#[test]
fn groups_act_apart_and_many_calls_may_be_under_way() {
    ranks(4, LONG, |world| {
        let own: Vec<usize> = (0..4).filter(|rank| rank % 2 == world.rank() % 2).collect();
        let (half, all) = (world.group(&own).unwrap(), world.everyone().unwrap());
        assert_eq!((half.size(), half.index(), half.ranks()), (2, world.rank() / 2, own.as_slice()));
        let tensors: Vec<Tensor> = (0..8).map(|i| values(world.rank() + i, 33, Kind::Float)).collect();
        let pending: Vec<_> = tensors.iter().map(|t| half.all_reduce(t, Reduction::Sum).unwrap()).collect();
        all.barrier().unwrap();
        all.trust();
        for (i, (tensor, pending)) in tensors.iter().zip(pending).enumerate() {
            pending.wait().unwrap();
            assert_equal(tensor, &(values(own[0] + i, 33, Kind::Float) + values(own[1] + i, 33, Kind::Float)));
        }
        all.barrier().unwrap();
    });
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    let told = ranks(3, LONG, |world| {
        let group = world.everyone().unwrap();
        let size = if world.rank() == 1 { 6 } else { 4 };
        group.all_reduce(&zeros(size, Kind::Float), Reduction::Sum).unwrap_err().to_string()
    });
    for (rank, text) in told.iter().enumerate() {
        assert_eq!(
            *text,
            format!(
                "rank {rank} of 3: the ranks do not make the same call: rank 0 makes all_reduce 0 (sum, 4 Float); \
                 rank 1 makes all_reduce 0 (sum, 6 Float); rank 2 makes all_reduce 0 (sum, 4 Float)"
            )
        );
    }
    let told = ranks(2, LONG, |world| {
        let group = world.everyone().unwrap();
        let pending = match world.rank() {
            0 => group.broadcast(&zeros(3, Kind::Float), 0),
            _ => group.all_reduce(&zeros(3, Kind::Double), Reduction::Max),
        };
        pending.unwrap_err().to_string()
    });
    assert!(
        told[0]
            .contains("rank 0 makes broadcast 0 (from member 0, 3 Float); rank 1 makes all_reduce 0 (max, 3 Double)")
    );
}

#[test]
fn a_call_that_cannot_be_right_is_refused_before_it_is_made() {
    let group = World::alone().everyone().unwrap();
    let text = |result: crate::Result<crate::Pending>| result.unwrap_err().to_string();
    assert_eq!(
        text(group.all_gather(&zeros(7, Kind::Float), &zeros(3, Kind::Float))),
        "rank 0 of 1: all_gather: 7 Float for 1 members of 3 Float"
    );
    assert!(text(group.broadcast(&zeros(1, Kind::Float), 1)).contains("no member 1"));
    assert!(World::alone().group(&[1]).unwrap_err().to_string().contains("this rank is not in it"));
}

#[test]
fn a_rank_that_goes_away_is_noticed_by_the_others() {
    let told = ranks(3, LONG, |world| {
        let group = world.everyone().unwrap();
        group.barrier().unwrap();
        if world.rank() == 2 {
            return None; // Dropped with its connections, as when a process dies.
        }
        drop(group);
        let group = world.everyone().unwrap();
        let tensor = zeros(5, Kind::Float);
        let ended = group.all_reduce(&tensor, Reduction::Sum).and_then(crate::Pending::wait);
        Some(ended.unwrap_err())
    });
    for (rank, error) in told.into_iter().enumerate().take(2) {
        let error = error.unwrap();
        assert!(error.is_loss());
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("rank {rank} of 3 lost another rank: all_reduce 1 with ranks 0, 1, 2")),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_never_comes_is_told_within_the_time_out() {
    let told = launches(3, |launch| {
        (launch.rank != 1).then(|| World::join(launch, Duration::from_secs(2), Device::Cpu).unwrap_err())
    });
    for rank in [0, 2] {
        let error = told[rank].as_ref().unwrap();
        assert!(error.is_loss());
        let text = error.to_string();
        assert!(text.starts_with(&format!("rank {rank} of 3 could not meet the others at 127.0.0.1:")), "{text}");
        assert!(text.contains("within 2.0 s: only ") && text.ends_with(" of 3 ranks came"), "{text}");
    }
}

#[test]
fn a_rank_that_hangs_is_noticed_within_the_time_out() {
    let given_up = std::sync::Barrier::new(2);
    let told = ranks(2, Duration::from_secs(2), |world| {
        let group = world.everyone().unwrap();
        let call = || group.all_reduce(&zeros(5, Kind::Float), Reduction::Sum).and_then(crate::Pending::wait);
        // Rank 1 lives, connected, and never makes the call.
        let ended = (world.rank() == 0).then(call);
        given_up.wait();
        ended
    });
    assert!(told[0].as_ref().unwrap().as_ref().unwrap_err().is_loss(), "{told:?}");
}

#[test]
fn what_is_sent_is_received() {
    everywhere(|world, size, kind| {
        let group = world.everyone().unwrap();
        let (own, members) = (group.index(), group.size());
        let far = |by: usize| (own + by) % members;
        if members == 1 {
            assert!(group.send(&values(0, size, kind), 0).unwrap_err().to_string().contains("no other member 0"));
            return;
        }
        // Round a ring, twice at once: messages between two ranks keep their order.
        let twice = [0, 1].map(|n| {
            let coming = zeros(size + n, kind);
            let sent = group.send(&values(own, size + n, kind), far(1)).unwrap();
            (coming, sent)
        });
        for (n, (coming, sent)) in (0..).zip(twice) {
            group.receive(&coming, far(members - 1)).unwrap().wait().unwrap();
            sent.wait().unwrap();
            assert_equal(&coming, &values(far(members - 1), size + n, kind));
        }
    });
}

#[test]
fn a_message_of_another_size_is_an_error_where_it_arrives() {
    let over = std::sync::Barrier::new(2);
    let told = ranks(2, LONG, |world| {
        let group = world.everyone().unwrap();
        let (sent, text) = match world.rank() {
            // Never taken.
            0 => (Some(group.send(&zeros(3, Kind::Float), 1).unwrap()), String::new()),
            _ => (None, group.receive(&zeros(4, Kind::Double), 0).unwrap_err().to_string()),
        };
        over.wait();
        drop(sent);
        text
    });
    assert_eq!(
        told[1],
        "rank 1 of 2: the ranks do not make the same call: rank 0 sends 3 Float; rank 1 receives 4 Double"
    );
}

#[test]
fn calls_are_recorded_while_asked_for() {
    let calls = ranks(2, LONG, |world| {
        let group = world.everyone().unwrap();
        group.barrier().unwrap();
        world.trace().begin();
        group.all_reduce(&zeros(5, Kind::Double), Reduction::Sum).unwrap().wait().unwrap();
        let calls = world.trace().end();
        group.barrier().unwrap();
        assert_eq!(world.trace().end(), []);
        calls
    });
    assert_eq!(calls[1], [crate::Call { name: "all_reduce", members: 2, bytes: 40 }]);
}
