//! Holds a value against a JSON Schema and says all that is wrong in a user's words.
//!
//! Covers what `schemars` derives from plain structs and enums: `type`, `properties`, `required`,
//! `additionalProperties`, `enum`, `const`, `anyOf`, `oneOf`, `items`, `$ref` into `$defs`, `minimum`, `maximum`.
//! Any other keyword is left to the stage itself, which reads the value into its own types.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::{Problem, suggest};

/// Splits a stage's table into (parameters, settings) by the settings' property names.
pub fn split(settings: &Value, table: &Value) -> (Value, Value) {
    let names = property_names(settings);
    let (settings, parameters): (Map<_, _>, Map<_, _>) =
        table.as_object().cloned().unwrap_or_default().into_iter().partition(|(key, _)| names.contains(key.as_str()));
    (Value::Object(parameters), Value::Object(settings))
}

/// All mistakes in a stage's table, in order of their field.
pub fn validate_split(parameters: &Value, settings: &Value, table: &Value) -> Vec<Problem> {
    let Some(object) = table.as_object() else {
        return vec![Problem::new(format!("a table of parameters is expected, not {}", told(table)))];
    };
    let (of_parameters, of_settings) = split(settings, table);
    let known: BTreeSet<&str> = property_names(parameters).union(&property_names(settings)).copied().collect();
    let open = parameters.get("additionalProperties") != Some(&Value::Bool(false));
    let mut problems = Vec::new();
    if !open {
        for key in object.keys().filter(|key| !known.contains(key.as_str())) {
            problems.push(unknown(key, key, &known));
        }
    }
    for (schema, value) in [(parameters, &of_parameters), (settings, &of_settings)] {
        // Unknown keys of the outer table are judged above, against the names of both halves.
        let mut checker = Checker { root: schema, problems: Vec::new() };
        checker.object(schema, value.as_object().unwrap_or(&Map::new()), "", false);
        problems.append(&mut checker.problems);
    }
    problems.sort_by(|a, b| a.field.cmp(&b.field));
    problems
}

fn property_names(schema: &Value) -> BTreeSet<&str> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(name, _)| name.as_str()).collect()
}

fn unknown(key: &str, path: &str, known: &BTreeSet<&str>) -> Problem {
    Problem::new(format!("unknown parameter `{key}`")).field(path).help(if known.is_empty() {
        "this table takes no parameters".to_owned()
    } else {
        suggest::help(key, known.iter().copied())
    })
}

struct Checker<'a> {
    root: &'a Value,
    problems: Vec<Problem>,
}

impl<'a> Checker<'a> {
    fn value(&mut self, schema: &'a Value, value: &Value, path: &str) {
        let schema = self.resolve(schema);
        for key in ["anyOf", "oneOf"] {
            if let Some(branches) = schema.get(key).and_then(Value::as_array) {
                self.branches(branches, value, path);
                return;
            }
        }
        if let Some(constant) = schema.get("const") {
            if constant != value {
                self.refuse(&[told_plain(constant)], value, path);
            }
            return;
        }
        if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
            if !allowed.contains(value) {
                self.refuse(&allowed.iter().map(told_plain).collect::<Vec<_>>(), value, path);
            }
            return;
        }
        if !type_fits(schema, value) || !range_fits(schema, value) {
            self.problems
                .push(Problem::new(format!("`{path}` must be {}, not {}", expected(schema), told(value))).field(path));
            return;
        }
        match value {
            Value::Object(object) => self.object(schema, object, path, true),
            Value::Array(items) => {
                if let Some(item_schema) = schema.get("items") {
                    for (index, item) in items.iter().enumerate() {
                        self.value(item_schema, item, &format!("{path}[{index}]"));
                    }
                }
            }
            _ => {}
        }
    }

    fn object(&mut self, schema: &'a Value, object: &Map<String, Value>, path: &str, judge_unknown: bool) {
        let child = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let properties = schema.get("properties").and_then(Value::as_object);
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            if !object.contains_key(name) {
                let problem = Problem::new(format!("missing parameter `{}`", child(name)));
                self.problems.push(if path.is_empty() { problem } else { problem.field(path) });
            }
        }
        for (key, value) in object {
            match (properties.and_then(|p| p.get(key)), schema.get("additionalProperties")) {
                (Some(schema), _) | (None, Some(schema @ Value::Object(_))) => self.value(schema, value, &child(key)),
                (None, Some(Value::Bool(false))) if judge_unknown => {
                    self.problems.push(unknown(key, &child(key), &property_names(schema)));
                }
                _ => {}
            }
        }
    }

    /// One of the branches must fit; the message speaks of the branch that was most likely meant.
    fn branches(&mut self, branches: &'a [Value], value: &Value, path: &str) {
        let (mut choices, mut shapes) = (Vec::new(), Vec::new());
        let mut best: Option<Vec<Problem>> = None;
        for branch in branches {
            let mut trial = Checker { root: self.root, problems: Vec::new() };
            trial.value(branch, value, path);
            if trial.problems.is_empty() {
                return;
            }
            match (branch.get("const"), branch.get("enum").and_then(Value::as_array)) {
                (Some(constant), _) => choices.push(told_plain(constant)),
                (None, Some(allowed)) => choices.extend(allowed.iter().map(told_plain)),
                (None, None) if branch.get("type") == Some(&Value::from("null")) => {}
                // A branch that fails only deeper down has the right shape.
                (None, None) if trial.problems.iter().all(|p| p.field.as_deref() != Some(path)) => {
                    if best.as_ref().is_none_or(|best| trial.problems.len() < best.len()) {
                        best = Some(trial.problems);
                    }
                }
                (None, None) => shapes.push(expected(self.resolve(branch))),
            }
        }
        match best {
            Some(mut problems) => self.problems.append(&mut problems),
            None if shapes.is_empty() => self.refuse(&choices, value, path),
            None => {
                shapes.extend(choices.iter().map(|choice| format!("`{choice}`")));
                let shapes = shapes.join(" or ");
                self.problems.push(Problem::new(format!("`{path}` must be {shapes}, not {}", told(value))).field(path));
            }
        }
    }

    fn resolve(&self, schema: &'a Value) -> &'a Value {
        let pointer = schema.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix('#'));
        pointer.and_then(|pointer| self.root.pointer(pointer)).unwrap_or(schema)
    }

    fn refuse(&mut self, choices: &[String], value: &Value, path: &str) {
        let list = choices.iter().map(|c| format!("`{c}`")).collect::<Vec<_>>().join(", ");
        let must = if choices.len() == 1 { "must be" } else { "must be one of" };
        let problem = Problem::new(format!("`{path}` {must} {list}, not {}", told(value))).field(path);
        let near = value.as_str().and_then(|name| suggest::nearest(name, choices.iter().map(String::as_str)));
        self.problems.push(match near {
            Some(near) => problem.help(format!("did you mean `{near}`?")),
            None => problem,
        });
    }
}

fn type_names(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn type_fits(schema: &Value, value: &Value) -> bool {
    let names = type_names(schema);
    names.is_empty()
        || names.iter().any(|name| match *name {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            _ => true,
        })
}

fn range_fits(schema: &Value, value: &Value) -> bool {
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    value.as_f64().is_none_or(|number| {
        bound("minimum").is_none_or(|low| number >= low)
            && bound("maximum").is_none_or(|high| number <= high)
            && bound("exclusiveMinimum").is_none_or(|low| number > low)
            && bound("exclusiveMaximum").is_none_or(|high| number < high)
    })
}

fn expected(schema: &Value) -> String {
    let names: Vec<&str> = type_names(schema).into_iter().filter(|name| *name != "null").collect();
    let mut text = names
        .iter()
        .map(|name| match *name {
            "object" => "a table",
            "array" => "an array",
            "string" => "a string",
            "boolean" => "`true` or `false`",
            "integer" => "an integer",
            "number" => "a number",
            other => other,
        })
        .collect::<Vec<_>>()
        .join(" or ");
    for (name, sign) in [("minimum", ">="), ("maximum", "<="), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<")] {
        if let Some(bound) = schema.get(name) {
            let and = if text.contains(['<', '>']) { " and" } else { "" };
            text = format!("{text}{and} {sign} {bound}");
        }
    }
    text
}

/// The value as a user would name it.
fn told(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(b) => format!("`{b}`"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) => format!("the string {s:?}"),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "a table".to_owned(),
    }
}

fn told_plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(schema: &Value, table: &Value) -> Vec<String> {
        validate_split(schema, &json!({"properties": {}}), table).into_iter().map(|p| p.message).collect()
    }

    #[test]
    fn lists_and_nested_references_are_walked() {
        let schema = json!({
            "type": "object",
            "properties": {"prompts": {"type": "array", "items": {"$ref": "#/$defs/Prompt"}}},
            "$defs": {"Prompt": {"type": "object", "required": ["text"], "additionalProperties": false,
                "properties": {"text": {"type": "string"}, "seed": {"type": ["integer", "null"], "minimum": 0}}}}
        });
        let table = json!({"prompts": [{"text": "a"}, {"text": 3, "seed": -1}, {"sead": 1}]});
        assert_eq!(
            messages(&schema, &table),
            [
                "`prompts[1].seed` must be an integer >= 0, not the number -1",
                "`prompts[1].text` must be a string, not the number 3",
                "missing parameter `prompts[2].text`",
                "unknown parameter `sead`",
            ]
        );
    }

    #[test]
    fn of_several_shapes_the_nearest_one_is_explained() {
        let schema = json!({"properties": {"prompts": {"anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "null"}
        ]}}});
        assert!(messages(&schema, &json!({"prompts": ["a", "b"]})).is_empty());
        assert_eq!(
            messages(&schema, &json!({"prompts": ["a", 1]})),
            ["`prompts[1]` must be a string, not the number 1"]
        );
        assert_eq!(
            messages(&schema, &json!({"prompts": true})),
            ["`prompts` must be a string or an array, not `true`"]
        );
    }

    #[test]
    fn an_integer_is_a_number_but_not_the_reverse() {
        let schema = json!({"properties": {"a": {"type": "number"}, "b": {"type": "integer"}}});
        assert!(messages(&schema, &json!({"a": 3, "b": 3})).is_empty());
        assert_eq!(messages(&schema, &json!({"b": 3.0})), ["`b` must be an integer, not the number 3.0"]);
    }
}
