{{- define "llm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "llm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains (include "llm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "llm.name" .) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "llm.selector" -}}
app.kubernetes.io/name: {{ include "llm.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "llm.serverSelector" -}}
{{ include "llm.selector" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "llm.labels" -}}
{{ include "llm.selector" . }}
app.kubernetes.io/version: {{ regexReplaceAll "[^A-Za-z0-9_.-]+" .Chart.AppVersion "-" | trunc 63 | trimAll "-_." | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The chart's labels with further ones (root, more, maybe component). A name stands once, and the chart's own
     value stays: selectors rely on it. */}}
{{- define "llm.moreLabels" -}}
{{- $own := include "llm.labels" .root | fromYaml -}}
{{- with get . "component" -}}
{{- $_ := set $own "app.kubernetes.io/component" . -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .more) $own | toYaml -}}
{{- end -}}

{{/* An image by digest. Takes image (repository, digest, maybe tag) and what (the value to name). */}}
{{- define "llm.image" -}}
{{- $digest := get .image "digest" -}}
{{- $tag := get .image "tag" -}}
{{- if $digest -}}
{{- printf "%s@%s" (required (printf "%s.repository is not set" .what) .image.repository) $digest -}}
{{- else if $tag -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- else -}}
{{- fail (printf "%s.digest is not set: images run by digest, e.g. --set %s.digest=sha256:…" .what .what) -}}
{{- end -}}
{{- end -}}

{{- define "llm.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "llm.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{/* Values that are fine each by itself and impossible together; the cluster would say so only at the roll-out. */}}
{{- define "llm.agreement" -}}
{{- $name := include "llm.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s cannot name a Service: it begins with a letter and has only a-z, 0-9 and -; set fullnameOverride" $name) -}}
{{- end -}}
{{- $drain := .Values.drain -}}
{{- if lt (int $drain.gracePeriodSeconds) (add (int $drain.preStopSeconds) 10 | int) -}}
{{- fail (printf "drain.gracePeriodSeconds %d leaves no time after drain.preStopSeconds %d: at least 10 s more" (int $drain.gracePeriodSeconds) (int $drain.preStopSeconds)) -}}
{{- end -}}
{{- $scaling := .Values.autoscaling -}}
{{- if and (ne $scaling.mode "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than autoscaling.maxReplicas %d" (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- $strategy := .Values.strategy -}}
{{- if and (eq $strategy.type "RollingUpdate") (has (toString $strategy.maxSurge) (list "0" "0%")) (has (toString $strategy.maxUnavailable) (list "0" "0%")) -}}
{{- fail "strategy.maxSurge and strategy.maxUnavailable are both 0: no pod could ever be replaced" -}}
{{- end -}}
{{- end -}}

{{/* The server's environment, as a list. A name that stands twice is refused: server-side apply rejects it. */}}
{{- define "llm.env" -}}
{{- $env := list (dict "name" "HOME" "value" "/tmp") (dict "name" "XDG_CACHE_HOME" "value" "/tmp/cache") -}}
{{- $env = concat $env (include "llm.authEnv" . | fromYamlArray) .Values.extraEnv -}}
{{- $seen := dict -}}
{{- range $env -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "extraEnv: %s is set twice (the chart or an earlier entry sets it)" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* How the key reaches a container: as a file for the bundled server, as a variable for the others. */}}
{{- define "llm.authEnv" -}}
{{- if not .Values.auth.enabled -}}
[]
{{- else if eq (include "llm.apiKeyFromFile" .) "true" -}}
- name: API_KEYS_FILE
  value: {{ include "llm.apiKeysFile" . }}
{{- else -}}
- name: DELIVER_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.auth.existingSecret | quote }}
      key: api-key
{{- end -}}
{{- end -}}

{{/* Init containers need the model's directory and the release's list of checksums. */}}
{{- define "llm.modelMounts" -}}
- name: scripts
  mountPath: /deliver
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "llm.initResources" -}}
requests:
  cpu: 500m
  memory: 256Mi
  ephemeral-storage: {{ index .Values.resources.requests "ephemeral-storage" }}
limits:
  memory: 1Gi
  ephemeral-storage: {{ index .Values.resources.limits "ephemeral-storage" }}
{{- end -}}
