//! What a stage may use: a device, threads, ranks. From the command line, the stage's table, or the recipe; never in a key.

use serde_json::{Map, Value};
use spec::graph::Node;
use spec::{Mistake, Problem};
use stage::Description;

use crate::workspace::{Threads, Workspace};

/// What a stage may use.
#[derive(Debug, Clone)]
pub(crate) struct Resources {
    /// `cpu`, `cuda` or `cuda:N`.
    pub(crate) device: String,
    /// CPU threads, of all ranks together.
    pub(crate) threads: Threads,
    /// Processes that share the work.
    pub(crate) ranks: usize,
}

impl Resources {
    /// Takes `device`, `threads` and `ranks` out of the stage's table, unless it has parameters of these names.
    pub(crate) fn take(
        workspace: &Workspace,
        node: &Node,
        description: &Description,
        table: &mut Map<String, Value>,
        mistakes: &mut Vec<Mistake>,
    ) -> Self {
        let (options, recipe) = (&workspace.options, &workspace.recipe);
        let own = |name: &str| {
            let schemas = [&description.parameters, &description.settings];
            schemas.iter().any(|schema| schema["properties"].get(name).is_some())
        };
        let mut refuse = |field: &str, message: String, help: &str| {
            let problem = Problem::new(message).field(field).help(help);
            mistakes.push(recipe.locate(&workspace.graph, &node.name, &problem));
        };
        let mut take = |name: &str| if own(name) { None } else { table.remove(name) };
        let count = |value: Option<Value>| value.map(|v| v.as_u64().filter(|n| *n > 0).and_then(|n| n.try_into().ok()));

        let mut for_stage = None;
        match take("device") {
            None => {}
            Some(Value::String(device)) => for_stage = Some(device),
            Some(_) => refuse("device", "`device` must be a string".to_owned(), "write `cpu`, `cuda` or `cuda:N`"),
        }
        let asked = options.device.clone().or_else(|| for_stage.clone()).or_else(|| recipe.device.clone());
        let device = asked.unwrap_or_else(|| "cpu".to_owned());
        let kind = device.split(':').next().unwrap_or_default();
        let numbered = device.strip_prefix("cuda:").is_none_or(|number| number.parse::<u32>().is_ok());
        if !matches!(kind, "cpu" | "cuda") || !numbered || device.starts_with("cpu:") {
            refuse("device", format!("`{device}` is no device"), "write `cpu`, `cuda` or `cuda:N`");
        }
        let can = description.devices.iter().any(|able| able == kind);
        if !can && matches!(kind, "cpu" | "cuda") && for_stage.as_ref() == Some(&device) {
            let help = format!("it can use: {}", description.devices.join(", "));
            refuse("device", format!("`{}` cannot run on `{device}`", node.name), &help);
        }
        // A device for the whole recipe is meant for the stages that can use it.
        let device = if can { device } else { "cpu".to_owned() };

        let mut threads = None;
        match count(take("threads")) {
            None => {}
            Some(Some(number)) => threads = Some(number),
            Some(None) => {
                refuse("threads", "`threads` must be an integer > 0".to_owned(), "leave it out for all cores");
            }
        }
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let asked = threads.or(node.threads.map(number)).or(recipe.threads.map(number));
        let threads = options.threads.or(asked).map_or(Threads::Share, Threads::Asked);

        let mut ranks: Option<usize> = None;
        match count(take("ranks")) {
            None => {}
            Some(Some(number)) => ranks = Some(number),
            Some(None) => refuse("ranks", "`ranks` must be an integer > 0".to_owned(), "leave it out for one process"),
        }
        // On the command line they are meant for the stages that can share work.
        let for_able = options.ranks.filter(|_| !description.ranks.is_empty());
        let ranks = for_able.or(ranks).unwrap_or(1);
        let kind = device.split(':').next().unwrap_or_default();
        if ranks > 1 && !description.ranks.iter().any(|able| able == kind) {
            let (name, able) = (&node.name, description.ranks.join(", "));
            let (message, help) = if able.is_empty() {
                (
                    format!("`{name}` runs as one process: it cannot share work between {ranks} ranks"),
                    "remove `ranks`".to_owned(),
                )
            } else {
                (format!("`{name}` cannot run as {ranks} ranks on `{device}` yet"), format!("it can on: {able}"))
            };
            refuse("ranks", message, &help);
        }
        Self { device, threads, ranks }
    }
}
