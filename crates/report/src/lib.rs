//! The page that a run leaves: one HTML file without scripts and without a network, from what the runner says
//! ([`Run`]) and what the run's tables answer. Knows no artifacts, no processes, and no stage by name; a table or a picture
//! that is not there leaves its section out.
//!
//! Its size is bounded whatever the tables hold: curves are averaged to a few hundred points by the query, lists end with
//! how many more there are, and pictures become thumbnails.

mod chart;
mod data;
mod facts;
mod graph;
mod page;
mod pictures;
mod sections;
mod text;

pub use facts::{Artifact, Ledger, Run, Source, Stage, Status};
pub use text::{bytes, duration};

use query::Session;

/// The page of a run. `session` holds the tables of its artifacts.
pub fn page(run: &Run, session: &Session) -> String {
    let data = data::Data::read(session);
    let pictures = pictures::Pictures::collect(run, session, &data);
    page::render(run, &data, &pictures).into_string()
}
