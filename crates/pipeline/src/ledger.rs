//! The `ledger` view: one row for every row of the source, and what became of it in the end.
//!
//! It is made from `samples`, `rejects` and `held` of each stage alone, so the stages of others count, too.

use std::collections::BTreeMap;

use query::Session;
use stage::Description;

use crate::show::Current;

/// The query; `None` if no stage takes samples in.
pub(crate) fn sql(
    session: &Session,
    stages: &[Current],
    described: &BTreeMap<String, Description>,
) -> query::Result<Option<String>> {
    let has = |stage: &str, table: &str| session.tables_of_stages().contains(&format!("{stage}.{table}"));
    let names = || stages.iter().map(|stage| stage.stage.as_str()).filter(|name| described.contains_key(*name));
    // Where rows come from: stages that take nothing in.
    let (sources, later): (Vec<&str>, Vec<&str>) =
        names().partition(|name| described[*name].inputs.is_empty() && has(name, "samples"));
    if sources.is_empty() {
        return Ok(None);
    }
    let base = union(sources.iter().map(|stage| format!("select sample_id, source from {}", table(stage, "samples"))));
    // Their refused rows never became samples.
    let at_once = sources.iter().filter(|stage| has(stage, "rejects")).map(|stage| {
        format!("select sample_id, source, 'rejected', stage, reason, detail from {}", table(stage, "rejects"))
    });
    let mut words = Vec::new();
    for stage in later {
        if has(stage, "rejects") {
            words.push(format!(
                "select sample_id, source, 'rejected' state, stage, reason, detail from {}",
                table(stage, "rejects")
            ));
        }
        if has(stage, "held") {
            let columns = session.columns(&format!("{stage}.held"))?;
            let detail =
                ["detail", "bucket"].into_iter().find(|name| columns.iter().any(|column| column.name == *name));
            words.push(format!(
                "select sample_id, cast(null as varchar) source, 'held' state, {} stage, reason, {} detail from {}",
                text(stage),
                detail.unwrap_or("cast(null as varchar)"),
                table(stage, "held")
            ));
        }
    }
    let kept = "select sample_id, source, 'kept' state, cast(null as varchar) stage, cast(null as varchar) reason, \
                cast(null as varchar) detail from base";
    let fates = if words.is_empty() {
        kept.to_owned()
    } else {
        "select b.sample_id, b.source, coalesce(w.state, 'kept'), w.stage, w.reason, w.detail \
         from base b left join (select * from words where n = 1) w on w.sample_id = b.sample_id"
            .to_owned()
    };
    let words = if words.is_empty() {
        String::new()
    } else {
        // In a graph with branches, a sample may be refused more than once; its fate is told once.
        format!(
            ", words as (select *, row_number() over (partition by sample_id order by stage, reason) n from ({}))",
            union(words.into_iter())
        )
    };
    let rows = union(std::iter::once(fates).chain(at_once));
    let fields = "sample_id, source, state, stage, reason, detail";
    Ok(Some(format!("with base as ({base}){words}, fates({fields}) as ({rows}) select {fields} from fates")))
}

fn union(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(" union all ")
}

fn table(stage: &str, table: &str) -> String {
    format!("\"{}\".\"{table}\"", stage.replace('"', "\"\""))
}

fn text(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}
